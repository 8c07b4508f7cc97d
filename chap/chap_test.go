package chap

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// kubevirtSecret is as long as the secrets that KubeVirt makes: base64url of 32 bytes.
const kubevirtSecret = "a-44-character-base64url-secret-of-kubevirt="

func sequence(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// TestResponseVectors compares with values that Python's hashlib computed: digest(identifier,
// secret, challenge).
func TestResponseVectors(t *testing.T) {
	long := strings.Repeat("\xff", 255)
	for _, tt := range []struct {
		alg        Algorithm
		identifier byte
		secret     string
		challenge  []byte
		want       string
	}{
		{MD5, 0, "twelve bytes", sequence(16), "7cfca3aa86d8de73168a6920cda423c0"},
		{MD5, 0x27, kubevirtSecret, sequence(32), "337c5fee468dca597b4ac2f9e02de51f"},
		{MD5, 255, long, make([]byte, 1024), "c2d21c32be86e9a8ef6afc00a313d2d2"},
		{SHA1, 0, "twelve bytes", sequence(16), "f4544661fd20ce969c93f697bfb80e8c63d638b9"},
		{SHA1, 0x27, kubevirtSecret, sequence(32), "2c1df27fccc3441bf2d3ab530f1b04117b2eda3b"},
		{SHA1, 255, long, make([]byte, 1024), "ddf4ef8a189a82555c62ff8c158689e0e48b0275"},
		{SHA256, 0, "twelve bytes", sequence(16),
			"9cb0ff2d079be3316b712b0002511bb7b8e77e7605205c9415e3b6ca219e327f"},
		{SHA256, 0x27, kubevirtSecret, sequence(32),
			"ad74b9b69f03d9d3e88567e87bda85ca08956d83f2c43a641f17dbb940a44725"},
		{SHA256, 255, long, make([]byte, 1024),
			"dd7ac05782dd14131ef55b0709740e428c4aa19894c4a252a9a98f42db7e4bc8"},
		{SHA3_256, 0, "twelve bytes", sequence(16),
			"d7e13c852aef28b78ea1cd06b46349687cbd452a64f20dd60e193426262b6e06"},
		{SHA3_256, 0x27, kubevirtSecret, sequence(32),
			"ee79867a66a6f1fd2da1d41d88dcd6e621f147090419426e1d54e648c3d64e06"},
		{SHA3_256, 255, long, make([]byte, 1024),
			"ad4baccc6db4c2665618998309bcd9824fbc136365bf38d462a9ddbea44617d1"},
	} {
		got := tt.alg.Response(tt.identifier, []byte(tt.secret), tt.challenge)
		require.Equal(t, tt.want, hex.EncodeToString(got), "%v of %d bytes", tt.alg, len(tt.secret))
	}
}

func TestSecretIsNeverShown(t *testing.T) {
	const value = "correct horse battery"
	type holder struct{ hidden Config }
	cfg := Config{Initiator: Credential{Username: "alice", Secret: NewSecret(value)},
		Target: Credential{Username: "bob", Secret: NewSecret(value + "2")}}
	auth := testtool.Must(NewAuthenticator(cfg))(t)
	for _, v := range []any{cfg, &cfg, cfg.Initiator, cfg.Initiator.Secret, &cfg.Initiator.Secret,
		holder{cfg}, &holder{cfg}, auth, auth.Begin("x")} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			shown := fmt.Sprintf(verb, v)
			require.NotContains(t, shown, value, verb)
			require.NotContains(t, shown, hex.EncodeToString([]byte(value)), verb)
		}
		require.NotContains(t, string(testtool.Must(json.Marshal(v))(t)), value)
	}
	require.Equal(t, "[redacted]", string(testtool.Must(cfg.Initiator.Secret.MarshalText())(t)))
	require.Equal(t, "[redacted]", cfg.Initiator.Secret.String())
	require.Empty(t, Secret{}.String())
}

func TestSecretEqual(t *testing.T) {
	require.True(t, NewSecret("abc").Equal(NewSecret("abc")))
	require.False(t, NewSecret("abc").Equal(NewSecret("abd")))
	require.False(t, NewSecret("abc").Equal(NewSecret("ab")))
	require.True(t, NewSecret("").Equal(Secret{}))
}

func TestCheckInitiatorName(t *testing.T) {
	for _, name := range []string{
		"iqn.1994-05.com.example", "iqn.1994-05.com.example:host", "IQN.1994-05.com.Example:Host",
		"iqn.2010-11.ronnie:iscsi-inq",
		"iqn.2008-11.org.linux-kvm:My_VM", "iqn.2008-11.org.linux-kvm:default_vm",
		"iqn.1991-05.com.microsoft:PC_1.example.com",
		"iqn.1994-05.com.example:h\u00f6st", "eui.02004567A425678D", "naa.52004567ba64678d",
		"NAA.62004567BA64678D0123456789ABCDEF",
		"iqn.2001-04.com.example:" + strings.Repeat("a", maxNameLen-24),
	} {
		require.NoError(t, CheckInitiatorName(name), name)
	}
	for name, want := range map[string]string{
		"":                                "iqn.1994-05.com.example:host",
		"alice":                           "iqn.1994-05.com.example:host",
		"ipn.1994-05.com.example:host":    "begin with iqn., eui. or naa.",
		"iqn":                             "begin with iqn., eui. or naa.",
		"iqn.example:host":                "YEAR-MONTH",
		"iqn.1994-5.com.example:host":     "YEAR-MONTH",
		"iqn.1994-13.com.example:host":    "YEAR-MONTH",
		"iqn.1994-05":                     "YEAR-MONTH",
		"iqn.1994-05.":                    "YEAR-MONTH",
		"iqn.1994-05.:host":               "YEAR-MONTH",
		"eui.02004567a425678g":            "16 hexadecimal",
		"naa.02004567":                    "16 or 32",
		"iqn.1994-05.com.example:my host": "space",
		"iqn.1994-05.com.example:host\n":  "unprintable",
		"iqn.1994-05.com.example:\u200b":  "unprintable",
		"iqn.1994-05.com.example:\xff":    "UTF-8",
		"iqn.2001-04.com.example:" + strings.Repeat("a", maxNameLen-23): "223",
	} {
		require.ErrorContains(t, CheckInitiatorName(name), want, name)
	}
}

const secretC = "another-secret-of-carol"

// login runs one exchange and calls between after the challenge and before the answer.
func login(t *testing.T, a *Authenticator, user, secret string, between func()) (*Proof, error) {
	t.Helper()
	e := a.Begin(initiatorIQN)
	defer e.Close()
	c := testtool.Must(e.Start("7"))(t)
	between()
	answer := respond(t, c, secret)
	return e.Verify(Reply{Name: &user, Response: &answer,
		Identifier: new("1"), Challenge: new("0x0102030405060708")})
}

func TestReplace(t *testing.T) {
	nothing := func() {}
	first := Config{Initiator: aliceCred, Target: targetCred}
	second := Config{Initiator: Credential{"carol", NewSecret(secretC)},
		Target: Credential{"other", NewSecret(secretA + "-too")}}
	a := newAuth(t, first)
	proof := testtool.Must(login(t, a, "alice", secretA, nothing))(t)
	require.Equal(t, "storage", proof.Name)
	require.True(t, a.Knows("alice"))

	// A login that already has its challenge is judged by the configuration at its answer.
	replace := func() { require.NoError(t, a.Replace(second)) }
	_, err := login(t, a, "alice", secretA, replace)
	requireFailure(t, err, FailureAuthentication, "unknown_user")
	require.False(t, a.Knows("alice"))
	proof = testtool.Must(login(t, a, "carol", secretC, nothing))(t)
	require.Equal(t, "other", proof.Name)
	back := func() { require.NoError(t, a.Replace(first)) }
	_, err = login(t, a, "alice", secretA, back)
	require.NoError(t, err)

	require.ErrorContains(t, a.Replace(Config{}), "no credential")
	require.NoError(t, testtool.Err(login(t, a, "alice", secretA, nothing)))

	bound := first
	bound.InitiatorName = "iqn.2001-04.com.example:another"
	require.NoError(t, a.Replace(bound))
	_, err = login(t, a, "alice", secretA, nothing)
	requireFailure(t, err, FailureAuthentication, "wrong_initiator_name")
}

func TestConfigEqual(t *testing.T) {
	base := func() Config {
		return Config{Initiator: Credential{"alice", NewSecret(secretA)},
			Target:        Credential{"storage", NewSecret(secretB)},
			InitiatorName: initiatorIQN}
	}
	require.True(t, base().Equal(base()))
	require.True(t, Config{}.Equal(Config{}))
	for name, change := range map[string]func(c *Config){
		"user":         func(c *Config) { c.Initiator.Username = "bob" },
		"secret":       func(c *Config) { c.Initiator.Secret = NewSecret(secretC) },
		"no secret":    func(c *Config) { c.Initiator.Secret = Secret{} },
		"target":       func(c *Config) { c.Target = Credential{} },
		"target's":     func(c *Config) { c.Target.Secret = NewSecret(secretC) },
		"name":         func(c *Config) { c.InitiatorName = "" },
		"another name": func(c *Config) { c.InitiatorName += "x" },
	} {
		changed := base()
		change(&changed)
		require.False(t, changed.Equal(base()), name)
	}
}

func TestParseBinary(t *testing.T) {
	full := sequence(1024)
	std := base64.StdEncoding
	for _, tt := range []struct {
		in   string
		want []byte // nil is an error
	}{
		{"0x00", []byte{0}},
		{"0xdeadBEEF", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0XDEADbeef", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0x1", []byte{1}}, // an odd constant lacks a leading zero: RFC 7143 6.1
		{"0x123", []byte{0x01, 0x23}},
		{"0b3q2+7w==", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0B3q2+7w==", []byte{0xde, 0xad, 0xbe, 0xef}},
		{"0x", nil},
		{"0b", nil},
		{"0b====", nil},
		{"", nil},
		{"0", nil},
		{"deadbeef", nil},
		{"1xdeadbeef", nil},
		{"0odeadbeef", nil},
		{"12345", nil},
		{"0xdeadbeeg", nil},
		{"0x de", nil},
		{"0x-1", nil},
		{"0b3q2+7w", nil},     // no padding
		{"0b3q2+7w=", nil},    // half of it
		{"0b3q2+7w===", nil},  // too much
		{"0b3q2-7w==", nil},   // the other alphabet
		{"0b3q2+\n7w==", nil}, // the decoder would skip it
		{"0b3q2+7x==", nil},   // bits that are not in the value
		{"0b3q2+7w==00", nil}, // something after it
		{"0xdeadbeef\x00", nil},
		{FormatBinary(full), full},
		{FormatBinary(append([]byte{0}, full...)), nil},
		{"0b" + std.EncodeToString(full), full},
		{"0b" + std.EncodeToString(append([]byte{0}, full...)), nil},
		{"0b" + std.EncodeToString(append([]byte{0, 0}, full...)), nil},
		{"0x0" + FormatBinary(full)[2:], nil}, // 2049 digits are 1025 bytes
		{"0x" + strings.Repeat("0", 1<<20), nil},
		{"0b" + strings.Repeat("A", 1<<20), nil},
	} {
		got, err := ParseBinary(tt.in)
		name := tt.in[:min(len(tt.in), 30)]
		if tt.want == nil {
			require.Error(t, err, name)
			require.Nil(t, got, name)
			if len(tt.in) > 4 {
				require.NotContains(t, err.Error(), tt.in[2:], "the error shows the value")
			}
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, tt.want, got, name)
	}
}

func TestParseNumber(t *testing.T) {
	for in, want := range map[string]uint64{"0": 0, "1": 1, "255": 255, "0x0": 0, "0xfF": 255,
		"0X10": 16, "0x001": 1,
		"18446744073709551615": 1<<64 - 1, "0xffffffffffffffff": 1<<64 - 1} {
		require.Equal(t, want, testtool.Must(ParseNumber(in))(t, in), in)
	}
	for _, in := range []string{"", "-1", "+1", "00", "01", "012", "0b1", "1 ", " 1", "1.0", "1_0",
		"0x", "0xg", "0x-1", "x1", "1~2", "Yes",
		"18446744073709551616", "0x10000000000000000"} {
		require.Error(t, testtool.Err(ParseNumber(in)), in)
	}
}
