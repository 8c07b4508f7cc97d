package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

func TestReservationEndsBeforeLogoutIsAnswered(t *testing.T) {
	s := start(t)
	second := s.login(t, other)
	for range 20 {
		holder := s.login(t, LoginOptions{Initiator: DefaultInitiator + ".holder",
			ISID: [6]byte{0x80, 7}})
		holder.MustGood(t, Command{LUN: 1, CDB: []byte{0x16, 0, 0, 0, 0, 0}})
		second.MustFail(t, Read10(1, 0, 1), "status 0x18")
		_, err := holder.Logout(pdu.LogoutCloseSession)
		require.NoError(t, err)
		second.MustGood(t, Read10(1, 0, 1))
	}
}

// TestClosedConnectionIsSeenAtTheNextLogin checks that an initiator that loses its connection and
// logs in at once with another ISID is not blocked by its own claims.
func TestClosedConnectionIsSeenAtTheNextLogin(t *testing.T) {
	s := start(t)
	for i := range 50 {
		o := LoginOptions{Initiator: DefaultInitiator + ".holder", ISID: [6]byte{0x80, byte(i)}}
		holder := s.login(t, o)
		holder.MustGood(t, Command{LUN: 1, CDB: []byte{0x16, 0, 0, 0, 0, 0}})
		require.NoError(t, holder.Close())
	}
	s.login(t, LoginOptions{Initiator: DefaultInitiator + ".holder",
		ISID: [6]byte{0x80, 99}}).MustGood(t, Read10(1, 0, 1))
}
