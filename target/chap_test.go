package target_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/chap"
	. "kubevirt.io/disk/target/targettest"
)

// challenged starts a login and returns it with the target's challenge.
func (s *server) challenged(t *testing.T, keys ...string) (*Conn, *LoginReply) {
	t.Helper()
	c := MustDial(t, s.addr)
	if len(keys) == 0 {
		keys = []string{"CHAP_A", "5"}
	}
	r, err := c.LoginStep(loginID, LoginPDU{CSG: StageSecurity, NSG: StageOperational,
		Keys: append(names(), append(KV("AuthMethod", "CHAP"), KV(keys...)...)...)})
	require.NoError(t, err)
	return c, r
}

// answer returns the right response to the challenge in r.
func answer(t *testing.T, r *LoginReply, secret string) []byte {
	t.Helper()
	id, challenge := challenge(t, r)
	return Respond(5, id, secret, challenge)
}

func challenge(t *testing.T, r *LoginReply) (byte, []byte) {
	t.Helper()
	var id byte
	_, err := fmt.Sscan(r.Keys.Get("CHAP_I"), &id)
	require.NoError(t, err)
	c, err := DecodeBinary(r.Keys.Get("CHAP_C"))
	require.NoError(t, err)
	return id, c
}

// responds sends the second step of CHAP and checks the status. A refusal closes the connection.
func responds(t *testing.T, c *Conn, want uint16, keys Keys) *LoginReply {
	t.Helper()
	r, err := c.LoginStep(loginID,
		LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true, Keys: keys})
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%04x", want), fmt.Sprintf("%04x", r.Status()))
	if want != 0 {
		require.Empty(t, r.Keys, "a refusal has no keys")
		require.NoError(t, c.ExpectClosed())
	}
	return r
}

func TestCHAPAlgorithms(t *testing.T) {
	s := start(t, withCHAP())
	for _, tt := range []struct{ offer, want string }{
		{"5", "5"}, {"6", "6"}, {"7", "7"}, {"8", "8"},
		{"5,6,7,8", "5"}, {"8,7,6,5", "8"}, {"7,5", "7"}, {"6,8,5", "6"}, {"99,7", "7"},
		{"4,255,6", "6"}, {"x,6", "6"},
	} {
		t.Run("6.2.1/first supported of "+tt.offer, func(t *testing.T) {
			a := good()
			a.Offer = tt.offer
			sess := s.login(t, LoginOptions{CHAP: a})
			sess.MustGood(t, TestUnitReady(1))
			_, r := s.challenged(t, "CHAP_A", tt.offer)
			require.Equal(t, tt.want, r.Keys.Get("CHAP_A"))
		})
	}
	for _, offer := range []string{"56", "9", "0", "", ",", "4,9", "-5", "05", "5.0"} {
		t.Run("6.2.1/nothing supported in "+offer, func(t *testing.T) {
			c, r := s.challenged(t, "CHAP_A", offer)
			require.Equal(t, uint16(0x0201), r.Status())
			require.Empty(t, r.Keys)
			require.NoError(t, c.ExpectClosed())
		})
	}
	t.Run("12.1.3/only allowed algorithms", func(t *testing.T) {
		s := start(t,
			withCHAP(func(c *chap.Config) {
				c.Algorithms = []chap.Algorithm{chap.SHA256,
					chap.SHA3_256}
			}))
		_, r := s.challenged(t, "CHAP_A", "5,6,8,7")
		require.Equal(t, "8", r.Keys.Get("CHAP_A"))
		_, r = s.challenged(t, "CHAP_A", "5,6")
		require.Equal(t, uint16(0x0201), r.Status())
	})
	t.Run("12.1/method and algorithm in PDUs of their own", func(t *testing.T) {
		a := good()
		a.Separate = true
		s.login(t, LoginOptions{CHAP: a})
	})
	t.Run("12.1/straight to full feature phase", func(t *testing.T) {
		s.login(t, LoginOptions{CHAP: good(), StraightToFull: true}).MustGood(t, TestUnitReady(1))
	})
	t.Run("12.1/first supported method of a list", func(t *testing.T) {
		a := good()
		a.Methods = "KRB5,SRP,CHAP,None"
		s.login(t, LoginOptions{CHAP: a})
		a.Methods = "None,CHAP" // None is not allowed here
		s.login(t, LoginOptions{CHAP: a})
	})
}

func TestCHAPRequired(t *testing.T) {
	s := start(t, withCHAP())
	t.Run("6.3.1/operational stage first",
		func(t *testing.T) { s.refused(t, LoginOptions{}, 0x0201) })
	t.Run("6.3.1/security stage without an offer", func(t *testing.T) {
		s.status(t, 0x0201, LoginPDU{CSG: StageSecurity, NSG: StageFull, Transit: true,
			Keys: names()})
		s.status(t, 0x0201, LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
			Keys: names()})
	})
	for _, methods := range []string{"None", "KRB5", "KRB5,None", "chap", "", "CHAP2"} {
		t.Run("12.1/offered "+methods, func(t *testing.T) {
			s.status(t, 0x0201, LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
				Keys: append(names(), KV("AuthMethod", methods)...)})
		})
	}
	t.Run("13.21/discovery needs it too", func(t *testing.T) {
		s.refused(t, LoginOptions{Discovery: true}, 0x0201)
		_, err := Login(s.addr, LoginOptions{Discovery: true, CHAP: good()})
		require.NoError(t, err)
	})
	for _, nsg := range []uint8{StageOperational, StageFull} {
		for _, keys := range []Keys{KV("AuthMethod", "CHAP"),
			KV("AuthMethod", "CHAP", "CHAP_A", "5"), KV("AuthMethod", "None,CHAP", "CHAP_A", "5")} {
			t.Run(fmt.Sprintf("6.3/leaving the stage to %d together with the offer of %d keys", nsg,
				len(keys)), func(t *testing.T) {
				c := MustDial(t, s.addr)
				r, err := c.LoginStep(loginID,
					LoginPDU{CSG: StageSecurity, NSG: nsg, Transit: true,
						Keys: append(names(), keys...)})
				require.NoError(t, err)
				require.Zero(t, r.Status())
				require.False(t, r.Transit, "the target accepts an initiator without proof")
			})
		}
	}
	t.Run("6.3/leaving the stage without an answer to the challenge", func(t *testing.T) {
		for _, nsg := range []uint8{StageOperational, StageFull} {
			c, _ := s.challenged(t)
			r, err := c.LoginStep(loginID, LoginPDU{CSG: StageSecurity, NSG: nsg, Transit: true})
			require.NoError(t, err)
			require.False(t, r.StatusClass == 0 && r.Transit,
				"the target accepts an initiator without proof")
			require.Equal(t, uint16(0x0207), r.Status())
		}
	})
	t.Run("6.3/the operational stage without an answer to the challenge", func(t *testing.T) {
		c, _ := s.challenged(t)
		r, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true})
		require.NoError(t, err)
		require.Equal(t, uint8(2), r.StatusClass)
		require.NoError(t, c.ExpectClosed())
	})
	t.Run("12.1/None works without a credential", func(t *testing.T) {
		s := start(t)
		s.login(t, LoginOptions{WithSecurity: true})
		s.status(t, 0, LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
			Keys: append(names(), KV("AuthMethod", "CHAP,None")...)})
	})
	t.Run("12.1/an initiator insists on authentication without a credential",
		func(t *testing.T) {
			s := start(t)
			s.status(t, 0x0201, LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
				Keys: append(names(), KV("AuthMethod", "CHAP")...)})
		})
}

func TestCHAPResponse(t *testing.T) {
	s := start(t, withCHAP())
	h := func(b []byte) string { return "0x" + hex.EncodeToString(b) }

	for _, tt := range []struct {
		name   string
		encode func(b []byte) string
	}{
		{"hexadecimal", h},
		{"upper-case hexadecimal",
			func(b []byte) string { return "0X" + strings.ToUpper(hex.EncodeToString(b)) }},
		{"mixed-case hexadecimal", func(b []byte) string { return "0X" + hex.EncodeToString(b) }},
		{"base64", func(b []byte) string { return "0b" + base64.StdEncoding.EncodeToString(b) }},
		{"base64 with 0B", func(b []byte) string {
			return "0B" +
				base64.StdEncoding.EncodeToString(b)
		}},
	} {
		t.Run("6.1/"+tt.name, func(t *testing.T) {
			c, r := s.challenged(t)
			responds(t, c, 0, KV("CHAP_N", user, "CHAP_R", tt.encode(answer(t, r, password))))
		})
	}
	// Wrong responses: none of them may authenticate.
	for _, tt := range []struct {
		name   string
		encode func(b []byte) string
		status uint16
	}{
		{"9.2/a wrong response", func(b []byte) string { b[3] ^= 1; return h(b) }, 0x0201},
		{"9.2/zeros", func([]byte) string { return h(make([]byte, 16)) }, 0x0201},
		{"12.1.3/shorter than the digest", func(b []byte) string { return h(b[:15]) }, 0x0201},
		{"12.1.3/longer than the digest", func(b []byte) string { return h(append(b, 0)) }, 0x0201},
		{"12.1.3/empty", func([]byte) string { return "" }, 0x0200},
		{"6.1/0x without digits", func([]byte) string { return "0x" }, 0x0200},
		{"6.1/no prefix", func(b []byte) string { return hex.EncodeToString(b) }, 0x0200},
		{"6.1/no hexadecimal digits",
			func(b []byte) string { return "0x" + strings.Repeat("g", 32) }, 0x0200},
		{"6.1/bad base64 alphabet", func(b []byte) string {
			return "0b" + strings.Repeat("-", 22) +
				"=="
		}, 0x0200},
		{"6.1/bad base64 padding", func(b []byte) string {
			return "0b" + strings.TrimRight(base64.StdEncoding.EncodeToString(b), "=") + "="
		}, 0x0200},
		{"6.1/an odd number of hexadecimal digits", func(b []byte) string { return h(b) + "0" },
			0x0200},
		{"12.1.3/1024 bytes", func([]byte) string { return h(make([]byte, 1024)) }, 0x0201},
		{"12.1.3/1025 bytes", func([]byte) string { return h(make([]byte, 1025)) }, 0x0200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, r := s.challenged(t)
			reply, err := c.LoginStep(loginID,
				LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
					Keys: KV("CHAP_N", user, "CHAP_R", tt.encode(answer(t, r, password)))})
			require.NoError(t, err)
			require.Equal(t, uint8(2), reply.StatusClass)
			// A malformed response may get another status than a wrong one; 0201 is always right.
			require.Contains(t, []uint16{0x0201, tt.status}, reply.Status())
			require.Empty(t, reply.Keys)
			require.NoError(t, c.ExpectClosed())
		})
	}
	t.Run("9.2/wrong password and unknown user look the same", func(t *testing.T) {
		c, r := s.challenged(t)
		wrong := responds(t, c, 0x0201,
			KV("CHAP_N", user, "CHAP_R", h(answer(t, r, "another password"))))
		for _, n := range []string{"", "Fedora", user + "x", user[:3], "0x6665646f7261", "nobody"} {
			c, r := s.challenged(t)
			unknown := responds(t, c, 0x0201, KV("CHAP_N", n, "CHAP_R", h(answer(t, r, password))))
			wrong.StatSN, unknown.StatSN = 0, 0
			require.Equal(t, wrong.LoginResponse, unknown.LoginResponse)
		}
	})
	t.Run("9.2/missing keys", func(t *testing.T) {
		c, r := s.challenged(t)
		responds(t, c, 0x0207, KV("CHAP_R", h(answer(t, r, password))))
		c, _ = s.challenged(t)
		responds(t, c, 0x0207, KV("CHAP_N", user))
		c, _ = s.challenged(t)
		responds(t, c, 0x0207, nil)
	})
	t.Run("9.2/all keys in one PDU", func(t *testing.T) {
		// A response before the challenge proves nothing.
		c, r := s.challenged(t, "CHAP_A", "5", "CHAP_N", user, "CHAP_R", h(make([]byte, 16)))
		require.Equal(t, uint8(2), r.StatusClass)
		require.Empty(t, r.Keys)
		require.NoError(t, c.ExpectClosed())
	})
	t.Run("9.2/a second try on one connection", func(t *testing.T) {
		c, r := s.challenged(t)
		responds(t, c, 0x0201, KV("CHAP_N", user, "CHAP_R", h(make([]byte, 16))))
		_ = c.SendLogin(loginID, LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
			Keys: KV("CHAP_N", user, "CHAP_R", h(answer(t, r, password)))})
		require.NoError(t, c.ExpectClosed())
	})
	t.Run("9.2/another algorithm's response", func(t *testing.T) {
		c, r := s.challenged(t)
		id, ch := challenge(t, r)
		responds(t, c, 0x0201, KV("CHAP_N", user, "CHAP_R", h(Respond(6, id, password, ch))))
	})
	t.Run("6.3/algorithms again after the challenge", func(t *testing.T) {
		c, _ := s.challenged(t)
		responds(t, c, 0x0200, KV("CHAP_A", "6"))
	})
	t.Run("6.1/0x in a name is plain text", func(t *testing.T) {
		s := start(t, withCHAP(func(c *chap.Config) { c.Initiator.Username = "0x6665646f7261" }))
		s.login(t, LoginOptions{CHAP: &CHAP{Username: "0x6665646f7261", Password: password}})
		s.refused(t, LoginOptions{CHAP: good()}, 0x0201)
	})
	require.NotZero(t, s.seen.count("refused"))
	s.login(t, LoginOptions{CHAP: good()})
}

func TestCHAPChallenges(t *testing.T) {
	s := start(t, withCHAP())
	t.Run("RFC 1994 2/a fresh challenge each time", func(t *testing.T) {
		seen, ids := map[string]bool{}, map[byte]bool{}
		for range 500 {
			c, r := s.challenged(t)
			id, ch := challenge(t, r)
			require.GreaterOrEqual(t, len(ch), 16)
			require.False(t, seen[string(ch)], "a challenge comes twice")
			seen[string(ch)], ids[id] = true, true
			require.NoError(t, c.Close())
		}
		require.Greater(t, len(ids), 100, "identifiers come from their whole range")
	})
	t.Run("9.2/a recorded response is useless later", func(t *testing.T) {
		c, r := s.challenged(t)
		recorded := "0x" + hex.EncodeToString(answer(t, r, password))
		responds(t, c, 0, KV("CHAP_N", user, "CHAP_R", recorded))
		c, _ = s.challenged(t)
		responds(t, c, 0x0201, KV("CHAP_N", user, "CHAP_R", recorded))
	})
}

func TestCHAPSecrets(t *testing.T) {
	for _, n := range []int{12, 16, 44, 255} {
		t.Run(fmt.Sprintf("9.2.1/secret of %d bytes", n), func(t *testing.T) {
			secret := strings.Repeat("aB3$ ~", 50)[:n]
			s := start(t,
				withCHAP(func(c *chap.Config) { c.Initiator.Secret = chap.NewSecret(secret) }))
			s.login(t, LoginOptions{CHAP: &CHAP{Username: user, Password: secret}})
			s.refused(t, LoginOptions{CHAP: &CHAP{Username: user, Password: secret[:n-1]}}, 0x0201)
		})
	}
	t.Run("9.2.1/under 96 bits", func(t *testing.T) {
		_, err := chap.NewAuthenticator(
			chap.Config{Initiator: chap.Credential{Username: user,
				Secret: chap.NewSecret("eleven byte")}})
		require.ErrorContains(t, err, "12")
	})
	t.Run("9.2.1/the same secret in both directions", func(t *testing.T) {
		_, err := chap.NewAuthenticator(chap.Config{
			Initiator: chap.Credential{Username: user, Secret: chap.NewSecret(password)},
			Target:    chap.Credential{Username: targetUser, Secret: chap.NewSecret(password)}})
		require.ErrorContains(t, err, "secret")
	})
	t.Run("9.2/a credential bound to an initiator name", func(t *testing.T) {
		s := start(t, withCHAP(func(c *chap.Config) { c.InitiatorName = DefaultInitiator }))
		s.login(t, LoginOptions{CHAP: good()})
		s.refused(t, LoginOptions{CHAP: good(), Initiator: "iqn.2026-01.test.example:thief"},
			0x0201)
	})
}

func TestCHAPMutual(t *testing.T) {
	s := start(t, withCHAP(mutual))
	both := func() *CHAP {
		a := good()
		a.TargetUsername, a.TargetPassword = targetUser, targetPassword
		return a
	}
	for _, offer := range []string{"5", "6", "7", "8"} {
		t.Run("12.1.3/algorithm "+offer, func(t *testing.T) {
			a := both()
			a.Offer, a.Identifier = offer, 255
			s.login(t, LoginOptions{CHAP: a}).MustGood(t, TestUnitReady(1))
			a.Base64 = true
			s.login(t, LoginOptions{CHAP: a})
		})
	}
	t.Run("12.1.3/one-way stays possible",
		func(t *testing.T) { s.login(t, LoginOptions{CHAP: good()}) })
	t.Run("9.2.1/an initiator that expects another secret notices", func(t *testing.T) {
		a := both()
		a.TargetPassword = "not the target's"
		_, err := Login(s.addr, LoginOptions{CHAP: a})
		require.ErrorIs(t, err, ErrTargetNotAuthentic)
	})
	t.Run("12.1.3/challenge of 1024 bytes", func(t *testing.T) {
		a := both()
		a.Challenge = bytes.Repeat([]byte{0xc3, 0x5a}, 512)
		s.login(t, LoginOptions{CHAP: a})
		a.Base64 = true
		s.login(t, LoginOptions{CHAP: a})
	})

	ours := func(keys ...string) Keys { return KV(keys...) }
	challengeValue := "0x" + strings.Repeat("5a", 16)
	for _, tt := range []struct {
		name   string
		keys   Keys
		status []uint16
	}{
		{"12.1.3/challenge of 1025 bytes",
			ours("CHAP_I", "1", "CHAP_C", "0x"+strings.Repeat("5a", 1025)),
			[]uint16{0x0200, 0x0201}},
		{"12.1.3/identifier 256", ours("CHAP_I", "256", "CHAP_C", challengeValue),
			[]uint16{0x0200, 0x0201}},
		{"12.1.3/identifier -1", ours("CHAP_I", "-1", "CHAP_C", challengeValue),
			[]uint16{0x0200, 0x0201}},
		{"12.1.3/an empty identifier", ours("CHAP_I", "", "CHAP_C", challengeValue),
			[]uint16{0x0200, 0x0201}},
		{"12.1.3/empty challenge", ours("CHAP_I", "1", "CHAP_C", ""), []uint16{0x0200, 0x0201}},
		{"12.1.3/bad challenge", ours("CHAP_I", "1", "CHAP_C", "0xzz"), []uint16{0x0200, 0x0201}},
		{"9.2/identifier without challenge", ours("CHAP_I", "1"), []uint16{0x0207}},
		{"9.2/challenge without identifier", ours("CHAP_C", challengeValue), []uint16{0x0207}},
		{"12.1.3/identifier in hexadecimal is a number",
			ours("CHAP_I", "0x1", "CHAP_C", challengeValue), []uint16{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, r := s.challenged(t)
			keys := append(KV("CHAP_N", user, "CHAP_R",
				"0x"+hex.EncodeToString(answer(t, r, password))), tt.keys...)
			reply, err := c.LoginStep(loginID,
				LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true, Keys: keys})
			require.NoError(t, err)
			require.Contains(t, tt.status, reply.Status())
			if tt.status[0] == 0 {
				got, err := DecodeBinary(reply.Keys.Get("CHAP_R"))
				require.NoError(t, err)
				require.Equal(t, Respond(5, 1, targetPassword, bytes.Repeat([]byte{0x5a}, 16)), got)
				return
			}
			require.Empty(t, reply.Keys, "no response to a bad challenge")
			require.NoError(t, c.ExpectClosed())
		})
	}
	t.Run("9.2.1/no proof for an initiator without proof", func(t *testing.T) {
		c, _ := s.challenged(t)
		responds(t, c, 0x0201, KV("CHAP_N", user, "CHAP_R", "0x"+strings.Repeat("00", 16), "CHAP_I",
			"1", "CHAP_C", challengeValue))
	})
	t.Run("9.2.1/the target's own challenge, on the same connection", func(t *testing.T) {
		c, r := s.challenged(t)
		responds(t, c, 0x0201,
			KV("CHAP_N", user, "CHAP_R", "0x"+hex.EncodeToString(answer(t, r, password)),
				"CHAP_I", r.Keys.Get("CHAP_I"), "CHAP_C", r.Keys.Get("CHAP_C")))
	})
	t.Run("9.2.1/the target's own challenge, encoded in another way", func(t *testing.T) {
		c, r := s.challenged(t)
		_, ch := challenge(t, r)
		responds(t, c, 0x0201,
			KV("CHAP_N", user, "CHAP_R", "0x"+hex.EncodeToString(answer(t, r, password)),
				"CHAP_I", "9", "CHAP_C", "0B"+base64.StdEncoding.EncodeToString(ch)))
	})
	t.Run("9.2.1/the target's own challenge from a parallel connection", func(t *testing.T) {
		_, victim := s.challenged(t)
		c, r := s.challenged(t)
		responds(t, c, 0x0201,
			KV("CHAP_N", user, "CHAP_R", "0x"+hex.EncodeToString(answer(t, r, password)),
				"CHAP_I", victim.Keys.Get("CHAP_I"), "CHAP_C", victim.Keys.Get("CHAP_C")))
	})
	t.Run("9.2.1/the same secret in both directions on the wire", func(t *testing.T) {
		// The initiator answers with the target's secret.
		s.refused(t, LoginOptions{CHAP: &CHAP{Username: user, Password: targetPassword}}, 0x0201)
	})
	t.Run("12.1.3/mutual CHAP without a credential for it", func(t *testing.T) {
		s := start(t, withCHAP())
		c, r := s.challenged(t)
		reply, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
				Keys: KV("CHAP_N", user,
					"CHAP_R", "0x"+hex.EncodeToString(answer(t, r, password)), "CHAP_I", "1",
					"CHAP_C",
					challengeValue)})
		require.NoError(t, err)
		require.Equal(t, uint16(0x0201), reply.Status())
		require.Empty(t, reply.Keys)
	})
	s.login(t, LoginOptions{CHAP: both()}).MustGood(t, TestUnitReady(1))
}
