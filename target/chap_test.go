package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	. "kubevirt.io/disk/target/targettest"
)

// TestCHAP: an initiator has to prove itself in every session, and so does the target if it asks,
// by each algorithm.
func TestCHAP(t *testing.T) {
	s := start(t, withCHAP(mutual))
	s.refused(t, LoginOptions{}, 0x0201)
	s.refused(t, LoginOptions{Discovery: true}, 0x0201)
	s.refused(t, LoginOptions{CHAP: &CHAP{Username: user, Password: "another password"}}, 0x0201)
	require.NotZero(t, s.seen.count("refused bad_password"))
	_, err := Login(s.addr, LoginOptions{Discovery: true, CHAP: good()})
	require.NoError(t, err)
	for _, offer := range []string{"5", "6", "7", "8"} {
		t.Run("12.1.3/algorithm "+offer, func(t *testing.T) {
			a := good()
			a.TargetUsername, a.TargetPassword = targetUser, targetPassword
			a.Offer, a.Identifier = offer, 255
			s.login(t, LoginOptions{CHAP: a}).MustGood(t, TestUnitReady(1))
			a.Base64 = true
			s.login(t, LoginOptions{CHAP: a})
		})
	}
}
