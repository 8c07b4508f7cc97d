package chap

import (
	"encoding/base64"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

const initiatorIQN = "iqn.2001-04.com.example:host"

var (
	aliceCred  = Credential{"alice", NewSecret(secretA)}
	targetCred = Credential{"storage", NewSecret(secretB)}
)

func newAuth(t testing.TB, cfg Config) *Authenticator {
	t.Helper()
	a, err := NewAuthenticator(cfg)
	require.NoError(t, err)
	return a
}

func ptr(s string) *string { return &s }

// respond computes CHAP_R from the challenge, as an initiator does.
func respond(t testing.TB, c Challenge, secret string) string {
	t.Helper()
	alg, err := ParseNumber(c.Algorithm)
	require.NoError(t, err)
	id, err := strconv.ParseUint(c.Identifier, 10, 8)
	require.NoError(t, err, "CHAP_I is 0 to 255")
	challenge, err := ParseBinary(c.Challenge, MaxBinaryLen)
	require.NoError(t, err)
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
		offer   string
		allowed []Algorithm
		want    string // "": none
	}{
		{"5", nil, "5"},
		{"5,6,7,8", nil, "5"},
		{"8,7,6,5", nil, "8"},
		{"7,5", nil, "7"},
		{"4,9,6", nil, "6"},
		{"x,,7", nil, "7"},
		{"0x7,5", nil, "0x7"}, // a number in the other notation, echoed as offered
		{"5,6,7,8", []Algorithm{SHA256, SHA1}, "6"},
		{"5", []Algorithm{SHA256}, ""},
		{"56", nil, ""},
		{"", nil, ""},
		{",", nil, ""},
		{"MD5", nil, ""},
		{"05", nil, ""},
		{"261", nil, ""}, // 5 modulo 256
		{"5 ,6 ", nil, ""},
		{strings.Repeat("9,", 5000), nil, ""},
	} {
		e := newAuth(t, Config{Initiator: aliceCred, Algorithms: tt.allowed}).Begin(initiatorIQN)
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
				c, err := e.Start(strconv.Itoa(int(alg)))
				require.NoError(t, err)
				sent, err := ParseBinary(c.Challenge, MaxBinaryLen)
				require.NoError(t, err)
				require.Len(t, sent, max(16, alg.Size()))
				r := Reply{Name: ptr("alice"), Response: ptr(respond(t, c, secret))}
				if mutual {
					r.Identifier, r.Challenge = ptr("200"),
						ptr("0x0102030405060708090a0b0c0d0e0f10")
				}
				proof, err := e.Verify(r)
				require.NoError(t, err)
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
	backC, backI := ptr("0x00112233445566778899aabbccddeeff"), ptr("1")
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
				*r = Reply{Name: r.Name, Identifier: backI,
					Challenge: backC}
			}, FailureMissing, "missing_chap_r"},
		{"no identifier", func(r *Reply, _ Challenge) { r.Challenge = backC }, FailureMissing,
			"missing_chap_i"},
		{"no challenge", func(r *Reply, _ Challenge) { r.Identifier = backI }, FailureMissing,
			"missing_chap_c"},
		{"unknown user", func(r *Reply, _ Challenge) { r.Name = ptr("bob") }, FailureAuthentication,
			"unknown_user"},
		{"empty user", func(r *Reply, _ Challenge) { r.Name = ptr("") }, FailureAuthentication,
			"unknown_user"},
		{"user in another case", func(r *Reply, _ Challenge) { r.Name = ptr("Alice") },
			FailureAuthentication, "unknown_user"},
		{"user in hex is plain text", func(r *Reply, _ Challenge) { r.Name = ptr("0x616c696365") },
			FailureAuthentication, "unknown_user"},
		{"wrong password", func(r *Reply,
			c Challenge) {
			r.Response = ptr(respond(t, c, "not the password"))
		}, FailureAuthentication, "bad_password"},
		{"the target's secret",
			func(r *Reply, c Challenge) { r.Response = ptr(respond(t, c, secretB)) },
			FailureAuthentication, "same_secret"},
		{"short response", func(r *Reply, _ Challenge) { r.Response = ptr((*r.Response)[:32]) },
			FailureAuthentication, "bad_password"},
		{"long response", func(r *Reply, _ Challenge) { *r.Response += "00" },
			FailureAuthentication, "bad_password"},
		{"1025 bytes", func(r *Reply,
			_ Challenge) {
			r.Response = ptr("0x" + strings.Repeat("00", 1025))
		}, FailureProtocol, "bad_chap_r"},
		{"bad hex", func(r *Reply, _ Challenge) { *r.Response = (*r.Response)[:33] + "g" },
			FailureProtocol, "bad_chap_r"},
		{"identifier 256", func(r *Reply, _ Challenge) {
			r.Identifier, r.Challenge = ptr("256"),
				backC
		}, FailureProtocol, "bad_chap_i"},
		{"challenge of 1025 bytes", func(r *Reply, _ Challenge) {
			r.Identifier, r.Challenge = backI, ptr("0x"+strings.Repeat("00", 1025))
		}, FailureProtocol, "bad_chap_c"},
		{"our challenge", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge = backI,
				ptr(c.Challenge)
		}, FailureAuthentication, "reflected_challenge"},
		{"our challenge in capitals", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge = backI, ptr("0X"+strings.ToUpper(c.Challenge[2:]))
		}, FailureAuthentication, "reflected_challenge"},
		{"our challenge in base64", func(r *Reply, c Challenge) {
			b, err := ParseBinary(c.Challenge, MaxBinaryLen)
			require.NoError(t, err)
			r.Identifier, r.Challenge = backI, ptr("0b"+base64.StdEncoding.EncodeToString(b))
		}, FailureAuthentication, "reflected_challenge"},
		{"our challenge and a wrong password", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge, r.Response = backI, ptr(c.Challenge),
				ptr(respond(t, c, "not the password"))
		}, FailureAuthentication, "reflected_challenge"},
		{"wrong password, mutual", func(r *Reply, c Challenge) {
			r.Identifier, r.Challenge, r.Response = backI, backC,
				ptr(respond(t, c, "not the password"))
		}, FailureAuthentication, "bad_password"},
	} {
		auth := newAuth(t, Config{Initiator: aliceCred, Target: targetCred})
		e := auth.Begin(initiatorIQN)
		c, err := e.Start("7")
		require.NoError(t, err)
		r := Reply{Name: ptr("alice"), Response: ptr(respond(t, c, secretA))}
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
	c, err := e.Start("5")
	require.NoError(t, err)
	proof, err := e.Verify(Reply{ptr("alice"), ptr(respond(t, c, secretA)), ptr("1"), ptr("0x01")})
	requireFailure(t, err, FailureAuthentication, "mutual_not_configured")
	require.Nil(t, proof)
	require.Empty(t, e.User())
}

func TestReflectionAcrossLogins(t *testing.T) {
	auth := newAuth(t, Config{Initiator: aliceCred, Target: targetCred})
	first := auth.Begin(initiatorIQN)
	victim, err := first.Start("5")
	require.NoError(t, err)
	for _, offer := range []string{"5", "6"} {
		second := auth.Begin(initiatorIQN)
		c, err := second.Start(offer)
		require.NoError(t, err)
		_, err = second.Verify(Reply{ptr("alice"), ptr(respond(t, c, secretA)), ptr("1"),
			ptr(victim.Challenge)})
		requireFailure(t, err, FailureAuthentication, "reflected_challenge")
		second.Close()
	}
	first.Close() // from here on the challenge is not outstanding
	third := auth.Begin(initiatorIQN)
	c, err := third.Start("5")
	require.NoError(t, err)
	proof, err := third.Verify(Reply{ptr("alice"), ptr(respond(t, c, secretA)), ptr("1"),
		ptr(victim.Challenge)})
	require.NoError(t, err)
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
		c, err := e.Start("5")
		require.NoError(t, err)
		_, err = e.Verify(Reply{Name: ptr("alice"), Response: ptr(respond(t, c, secretA))})
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
		c, err := user.Start("5")
		require.NoError(t, err)
		_, noUser := user.Verify(Reply{Name: &hostile, Response: ptr(respond(t, c, secretA))})
		name := auth.Begin(hostile)
		c, err = name.Start("5")
		require.NoError(t, err)
		_, noName := name.Verify(Reply{Name: ptr("alice"), Response: ptr(respond(t, c, secretA))})
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
	_, err := e.Verify(Reply{Name: ptr("alice"), Response: ptr("0x00")})
	requireFailure(t, err, FailureProtocol, "chap_out_of_order")
	_, err = e.Start("5")
	require.NoError(t, err)
	e.Close()
	_, err = e.Verify(Reply{Name: ptr("alice"), Response: ptr("0x00")})
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
		if err != nil {
			t.Fatal(err)
		}
		b, err := ParseBinary(c.Challenge, 16)
		if err != nil {
			t.Fatal(err)
		}
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
					_, err = e.Verify(Reply{ptr("alice"), ptr(respond(t, c, secretA)), ptr("1"),
						ptr("0x0102")})
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

func TestFailureKindString(t *testing.T) {
	require.Equal(t, "authentication failure", FailureAuthentication.String())
	require.Equal(t, "missing parameter", FailureMissing.String())
	require.Equal(t, "initiator error", FailureProtocol.String())
	require.Equal(t, "FailureKind(9)", FailureKind(9).String())
}
