package chap

import (
	"encoding/base64"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const initiatorIQN = "iqn.2001-04.com.example:host"

var (
	aliceCred  = Credential{"alice", NewSecret(secretA)}
	targetCred = Credential{"storage", NewSecret(secretB)}
)

func newAuth(t testing.TB, cfg Config) *Authenticator {
	t.Helper()
	return testtool.Must(NewAuthenticator(cfg))(t)
}

// respond computes CHAP_R from the challenge, as an initiator does.
//
//go:fix inline
func respond(t testing.TB, c Challenge, secret string) string {
	t.Helper()
	alg := testtool.Must(ParseNumber(c.Algorithm))(t)
	id := testtool.Must(strconv.ParseUint(c.Identifier, 10, 8))(t, "CHAP_I is 0 to 255")
	challenge := testtool.Must(ParseBinary(c.Challenge))(t)
	return FormatBinary(Algorithm(alg).Response(byte(id), []byte(secret), challenge))
}

func requireFailure(t testing.TB, err error, kind FailureKind, reason string) {
	t.Helper()
	var failure *Error
	require.True(t, errors.As(err, &failure), "error %v", err)
	require.Equal(t, kind, failure.Kind, "%v", err)
	require.Equal(t, reason, failure.Reason)
	require.NotContains(t, err.Error(), secretA)
	require.NotContains(t, err.Error(), secretB)
}

func TestAlgorithmChoice(t *testing.T) {
	for _, tt := range []struct {
		offer, want string // "": none
	}{
		{"5", "5"},
		{"5,6,7,8", "5"},
		{"8,7,6,5", "8"},
		{"7,5", "7"},
		{"4,9,6", "6"},
		{"x,,7", "7"},
		{"0x7,5", "0x7"}, // a number in the other notation, echoed as offered
		{"56", ""},
		{"", ""},
		{",", ""},
		{"MD5", ""},
		{"05", ""},
		{"261", ""}, // 5 modulo 256
		{"5 ,6 ", ""},
		{strings.Repeat("9,", 5000), ""},
	} {
		e := newAuth(t, Config{Initiator: aliceCred}).Begin(initiatorIQN)
		c, err := e.Start(tt.offer)
		if tt.want == "" {
			requireFailure(t, err, FailureAuthentication, "no_common_algorithm")
			require.Less(t, len(err.Error()), 200)
			continue
		}
		require.NoError(t, err, tt.offer)
		require.Equal(t, tt.want, c.Algorithm, tt.offer)
	}
}

// TestExchange runs each algorithm in both directions, with secrets of common lengths.
func TestExchange(t *testing.T) {
	for _, alg := range []Algorithm{MD5, SHA1, SHA256, SHA3_256} {
		for _, n := range []int{12, 16, 44, 255} {
			secret, own := strings.Repeat("i", n), strings.Repeat("t", n)
			auth := newAuth(t,
				Config{Initiator: Credential{"alice", NewSecret(secret)},
					Target: Credential{"storage", NewSecret(own)}})
			for _, mutual := range []bool{false, true} {
				e := auth.Begin(initiatorIQN)
				c := testtool.Must(e.Start(strconv.Itoa(int(alg))))(t)
				sent := testtool.Must(ParseBinary(c.Challenge))(t)
				require.Len(t, sent, max(16, alg.hash().Size()))
				r := Reply{Name: new("alice"), Response: new(respond(t, c, secret))}
				if mutual {
					r.Identifier, r.Challenge = new("200"),
						new("0x0102030405060708090a0b0c0d0e0f10")
				}
				proof := testtool.Must(e.Verify(r))(t)
				require.Equal(t, "alice", e.User())
				if mutual {
					want := respond(t, Challenge{strconv.Itoa(int(alg)), "200", *r.Challenge}, own)
					require.Equal(t, &Proof{"storage", want}, proof)
				} else {
					require.Nil(t, proof)
				}
				e.Close()
			}
			require.Empty(t, auth.outstanding)
		}
	}
}

func TestVerifyFailures(t *testing.T) {
	backC, backI := new("0x00112233445566778899aabbccddeeff"), new("1")
	for _, tt := range []struct {
		name   string
		change func(r *Reply, c Challenge)
		kind   FailureKind
		reason string
	}{
		{"no name", func(r *Reply, _ Challenge) { r.Name = nil }, FailureMissing, "missing_chap_n"},
		{"no response", func(r *Reply, _ Challenge) { r.Response = nil }, FailureMissing,
			"missing_chap_r"},
		{"no response but a challenge",
			func(r *Reply, c Challenge) {
				*r = Reply{Name: r.Name, Identifier: backI, Challenge: backC}
			}, FailureMissing, "missing_chap_r"},
		{"no identifier", func(r *Reply, _ Challenge) { r.Challenge = backC }, FailureMissing,
			"missing_chap_i"},
		{"no challenge", func(r *Reply, _ Challenge) { r.Identifier = backI }, FailureMissing,
			"missing_chap_c"},
		{"unknown user", func(r *Reply, _ Challenge) { r.Name = new("bob") }, FailureAuthentication,
			"unknown_user"},
		{"empty user", func(r *Reply, _ Challenge) { r.Name = new("") }, FailureAuthentication,
			"unknown_user"},
		{"user in another case", func(r *Reply, _ Challenge) { r.Name = new("Alice") },
			FailureAuthentication, "unknown_user"},
		{"user in hex is plain text", func(r *Reply, _ Challenge) { r.Name = new("0x616c696365") },
			FailureAuthentication, "unknown_user"},
		{"wrong password", func(r *Reply, c Challenge) {
			r.Response = new(respond(t, c, "not the password"))
		}, FailureAuthentication, "bad_password"},
		{"the target's secret",
			func(r *Reply, c Challenge) { r.Response = new(respond(t, c, secretB)) },
			FailureAuthentication, "same_secret"},
		{"short response", func(r *Reply, _ Challenge) { r.Response = new((*r.Response)[:32]) },
			FailureAuthentication, "bad_password"},
		{"long response", func(r *Reply, _ Challenge) { *r.Response += "00" },
			FailureAuthentication, "bad_password"},
		{"1025 bytes", func(r *Reply, _ Challenge) {
			r.Response = new("0x" + strings.Repeat("00", 1025))
		}, FailureProtocol, "bad_chap_r"},
		{"bad hex", func(r *Reply, _ Challenge) { *r.Response = (*r.Response)[:33] + "g" },
			FailureProtocol, "bad_chap_r"},
		{"identifier 256", func(r *Reply, _ Challenge) {
			r.Identifier, r.Challenge = new("256"), backC
		}, FailureProtocol, "bad_chap_i"},
		{"challenge of 1025 bytes", func(r *Reply, _ Challenge) {
			r.Identifier, r.Challenge = backI, new("0x"+strings.Repeat("00", 1025))
		}, FailureProtocol, "bad_chap_c"},
		{"our challenge", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge = backI, new(c.Challenge)
		}, FailureAuthentication, "reflected_challenge"},
		{"our challenge in capitals", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge = backI, new("0X"+strings.ToUpper(c.Challenge[2:]))
		}, FailureAuthentication, "reflected_challenge"},
		{"our challenge in base64", func(r *Reply, c Challenge) {
			b := testtool.Must(ParseBinary(c.Challenge))(t)
			r.Identifier, r.Challenge = backI, new("0b"+base64.StdEncoding.EncodeToString(b))
		}, FailureAuthentication, "reflected_challenge"},
		{"our challenge and a wrong password", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge, r.Response = backI, new(c.Challenge),
				new(respond(t, c, "not the password"))
		}, FailureAuthentication, "reflected_challenge"},
		{"wrong password, mutual", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge, r.Response = backI, backC,
				new(respond(t, c, "not the password"))
		}, FailureAuthentication, "bad_password"},
	} {
		auth := newAuth(t, Config{Initiator: aliceCred, Target: targetCred})
		e := auth.Begin(initiatorIQN)
		c := testtool.Must(e.Start("7"))(t)
		r := Reply{Name: new("alice"), Response: new(respond(t, c, secretA))}
		tt.change(&r, c)
		proof, err := e.Verify(r)
		require.Nil(t, proof, tt.name)
		requireFailure(t, err, tt.kind, tt.reason)
		require.NotContains(t, err.Error(), c.Challenge[2:], tt.name)
		require.Empty(t, e.User(), tt.name)
		e.Close()
		e.Close()
		require.Empty(t, auth.outstanding, tt.name)
	}
}

func TestMutualNotConfigured(t *testing.T) {
	e := newAuth(t, Config{Initiator: aliceCred}).Begin(initiatorIQN)
	c := testtool.Must(e.Start("5"))(t)
	proof, err := e.Verify(Reply{new("alice"), new(respond(t, c, secretA)), new("1"), new("0x01")})
	requireFailure(t, err, FailureAuthentication, "mutual_not_configured")
	require.Nil(t, proof)
	require.Empty(t, e.User())
}

func TestReflectionAcrossLogins(t *testing.T) {
	auth := newAuth(t, Config{Initiator: aliceCred, Target: targetCred})
	first := auth.Begin(initiatorIQN)
	victim := testtool.Must(first.Start("5"))(t)
	for _, offer := range []string{"5", "6"} {
		second := auth.Begin(initiatorIQN)
		c := testtool.Must(second.Start(offer))(t)
		_, err := second.Verify(Reply{new("alice"), new(respond(t, c, secretA)), new("1"),
			new(victim.Challenge)})
		requireFailure(t, err, FailureAuthentication, "reflected_challenge")
		second.Close()
	}
	first.Close() // from here on the challenge is not outstanding
	third := auth.Begin(initiatorIQN)
	c := testtool.Must(third.Start("5"))(t)
	proof := testtool.Must(third.Verify(Reply{new("alice"), new(respond(t, c, secretA)), new("1"),
		new(victim.Challenge)}))(t)
	require.NotNil(t, proof)
}

func TestInitiatorNameBinding(t *testing.T) {
	for _, tt := range []struct {
		bound, name string
		ok          bool
	}{
		{"", initiatorIQN, true},
		{initiatorIQN, initiatorIQN, true},
		{strings.ToUpper(initiatorIQN), initiatorIQN, true},
		{initiatorIQN, strings.ToUpper(initiatorIQN), true},
		{initiatorIQN, "iqn.2001-04.com.example:other", false},
		{initiatorIQN, "", false},
	} {
		e := newAuth(t, Config{Initiator: aliceCred, InitiatorName: tt.bound}).Begin(tt.name)
		c := testtool.Must(e.Start("5"))(t)
		_, err := e.Verify(Reply{Name: new("alice"), Response: new(respond(t, c, secretA))})
		if tt.ok {
			require.NoError(t, err)
			continue
		}
		requireFailure(t, err, FailureAuthentication, "wrong_initiator_name")
	}
}

// TestWhatAPeerSentIsQuoted: a peer can write neither lines of its own nor long lines into the log.
func TestWhatAPeerSentIsQuoted(t *testing.T) {
	auth := newAuth(t, Config{Initiator: aliceCred, InitiatorName: initiatorIQN})
	for _, hostile := range []string{"a\nlevel=info\x1b[2J\u202e", strings.Repeat("n\n", 5000)} {
		offer := auth.Begin(initiatorIQN)
		_, noAlgorithm := offer.Start(hostile)
		user := auth.Begin(initiatorIQN)
		c := testtool.Must(user.Start("5"))(t)
		_, noUser := user.Verify(Reply{Name: &hostile, Response: new(respond(t, c, secretA))})
		name := auth.Begin(hostile)
		c = testtool.Must(name.Start("5"))(t)
		_, noName := name.Verify(Reply{Name: new("alice"), Response: new(respond(t, c, secretA))})
		requireFailure(t, noAlgorithm, FailureAuthentication, "no_common_algorithm")
		requireFailure(t, noUser, FailureAuthentication, "unknown_user")
		requireFailure(t, noName, FailureAuthentication, "wrong_initiator_name")
		for _, err := range []error{noAlgorithm, noUser, noName} {
			require.Less(t, len(err.Error()), 400)
			require.Regexp(t, `^[ -~]+$`, err.Error())
		}
	}
}

func TestVerifyWithoutChallenge(t *testing.T) {
	e := newAuth(t, Config{Initiator: aliceCred}).Begin(initiatorIQN)
	_, err := e.Verify(Reply{Name: new("alice"), Response: new("0x00")})
	requireFailure(t, err, FailureProtocol, "chap_out_of_order")
	require.NoError(t, testtool.Err(e.Start("5")))
	e.Close()
	_, err = e.Verify(Reply{Name: new("alice"), Response: new("0x00")})
	requireFailure(t, err, FailureProtocol, "chap_out_of_order")
}

// TestChallengesNeverRepeat also checks that every identifier gets used.
func TestChallengesNeverRepeat(t *testing.T) {
	n := 1_000_000
	if testing.Short() {
		n = 100_000
	}
	auth := newAuth(t, Config{Initiator: aliceCred})
	seen := make(map[[16]byte]struct{}, n)
	identifiers := make(map[string]struct{})
	for range n {
		e := auth.Begin(initiatorIQN)
		c, err := e.Start("5")
		require.NoError(t, err)
		b, err := ParseBinary(c.Challenge)
		require.NoError(t, err)
		seen[[16]byte(b)] = struct{}{}
		identifiers[c.Identifier] = struct{}{}
		e.Close()
	}
	require.Len(t, seen, n)
	require.Len(t, identifiers, 256)
	require.Empty(t, auth.outstanding)
}

func TestConcurrentExchanges(t *testing.T) {
	auth := newAuth(t, Config{Initiator: aliceCred, Target: targetCred})
	var wg sync.WaitGroup
	errs := make(chan error, 800)
	for range 8 {
		wg.Go(func() {
			for range 100 {
				e := auth.Begin(initiatorIQN)
				c, err := e.Start("5")
				if err == nil {
					_, err = e.Verify(Reply{new("alice"), new(respond(t, c, secretA)), new("1"),
						new("0x0102")})
				}
				e.Close()
				errs <- err
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.Empty(t, auth.outstanding)
}

// FuzzValues decodes numbers and binary values that a peer sends. An accepted value is within its
// bounds, and means the same when it is encoded again.
func FuzzValues(f *testing.F) {
	for _, seed := range []string{"", "0", "255", "256", "-1", "0x", "0xff", "0XfF", "0x123", "0b",
		"0bAQID", "0BAQ==", "0bAR==", "0b\n", "18446744073709551616",
		"0x" + strings.Repeat("00", maxBinaryLen), "0x" + strings.Repeat("00", maxBinaryLen+1)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if b, err := ParseBinary(value); err == nil {
			require.NotEmpty(t, b)
			require.LessOrEqual(t, len(b), maxBinaryLen)
			require.Equal(t, b, testtool.Must(ParseBinary(FormatBinary(b)))(t))
		} else {
			require.Nil(t, b)
		}
		if n, err := ParseNumber(value); err == nil {
			require.Equal(t, n, testtool.Must(ParseNumber(strconv.FormatUint(n, 10)))(t))
		}
	})
}

// FuzzExchange answers a challenge with anything. Nobody gets in, because the fuzzer cannot reach
// the right answer, and no error shows a secret.
func FuzzExchange(f *testing.F) {
	f.Add("5", "alice", "0x00", "1", "0x01", byte(15))
	f.Add("5,6,7,8", "storage", "0bAAAA", "256", "0x", byte(3))
	f.Add("", "", "", "", "", byte(0))
	auth := newAuth(f, Config{Initiator: aliceCred, Target: targetCred})
	f.Fuzz(func(t *testing.T, offer, name, response, identifier, challenge string, present byte) {
		e := auth.Begin(initiatorIQN)
		defer e.Close()
		var failure *Error
		if _, err := e.Start(offer); err != nil {
			require.ErrorAs(t, err, &failure)
		}
		var r Reply
		for i, field := range []struct {
			to   **string
			from string
		}{{&r.Name, name}, {&r.Response, response}, {&r.Identifier, identifier},
			{&r.Challenge, challenge}} {
			if present&(1<<i) != 0 {
				*field.to = &field.from
			}
		}
		proof, err := e.Verify(r)
		require.ErrorAs(t, err, &failure)
		require.Nil(t, proof)
		require.Empty(t, e.User())
		if !strings.Contains(name+offer, secretA) && !strings.Contains(name+offer, secretB) {
			require.NotContains(t, err.Error(), secretA)
			require.NotContains(t, err.Error(), secretB)
		}
	})
}
