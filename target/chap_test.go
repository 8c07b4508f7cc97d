package target_test

import (
	"encoding/hex"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

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

func TestCHAPRequired(t *testing.T) {
	s := start(t, withCHAP())
	t.Run("6.3.1/operational stage first",
		func(t *testing.T) { s.refused(t, LoginOptions{}, 0x0201) })
	t.Run("13.21/discovery needs it too", func(t *testing.T) {
		s.refused(t, LoginOptions{Discovery: true}, 0x0201)
		_, err := Login(s.addr, LoginOptions{Discovery: true, CHAP: good()})
		require.NoError(t, err)
	})
}

func TestCHAPResponse(t *testing.T) {
	s := start(t, withCHAP())
	h := func(b []byte) string { return "0x" + hex.EncodeToString(b) }

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
	t.Run("9.2/a second try on one connection", func(t *testing.T) {
		c, r := s.challenged(t)
		responds(t, c, 0x0201, KV("CHAP_N", user, "CHAP_R", h(make([]byte, 16))))
		_ = c.SendLogin(loginID, LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
			Keys: KV("CHAP_N", user, "CHAP_R", h(answer(t, r, password)))})
		require.NoError(t, c.ExpectClosed())
	})
	require.NotZero(t, s.seen.count("refused"))
	s.login(t, LoginOptions{CHAP: good()})
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
	t.Run("9.2.1/an initiator that expects another secret notices", func(t *testing.T) {
		a := both()
		a.TargetPassword = "not the target's"
		_, err := Login(s.addr, LoginOptions{CHAP: a})
		require.ErrorIs(t, err, ErrTargetNotAuthentic)
	})

	t.Run("9.2.1/the target's own challenge from a parallel connection", func(t *testing.T) {
		_, victim := s.challenged(t)
		c, r := s.challenged(t)
		responds(t, c, 0x0201,
			KV("CHAP_N", user, "CHAP_R", "0x"+hex.EncodeToString(answer(t, r, password)),
				"CHAP_I", victim.Keys.Get("CHAP_I"), "CHAP_C", victim.Keys.Get("CHAP_C")))
	})
	s.login(t, LoginOptions{CHAP: both()}).MustGood(t, TestUnitReady(1))
}
