package target_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	tt "kubevirt.io/disk/target/targettest"
)

// TestRemoveUnusedLUN: a LUN cannot be removed while a session that has used its disk lasts.
func TestRemoveUnusedLUN(t *testing.T) {
	s := start(t)
	_, err := s.inUse.RemoveUnused(7)
	require.ErrorContains(t, err, "there is no LUN 7")
	for _, name := range []string{"iqn.2026-01.test:b", "iqn.2026-01.test:a"} {
		sess := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: name}, 1, 2)
		sess.MustGood(t, tt.TestUnitReady(1)) // that is not a use
		sess.MustGood(t, tt.Read10(2, 0, 1))
	}
	var used *serving.InUseError
	_, err = s.inUse.RemoveUnused(2)
	require.ErrorAs(t, err, &used)
	require.Equal(t, []string{"iqn.2026-01.test:a", "iqn.2026-01.test:b"}, used.Initiators)
	released, err := s.inUse.RemoveUnused(1)
	require.NoError(t, err)
	<-released
	s.EndSessions(func(status.Session) bool { return true })
	testtool.Eventually(t, func() bool {
		_, err = s.inUse.RemoveUnused(2)
		return !errors.As(err, new(*serving.InUseError))
	}, "the sessions' use ends")
	require.NoError(t, err)
}

// TestRemoveReservedLUN: the holder of a persistent reservation keeps the LUN there, even if its
// session has ended. A registered initiator without a reservation does not.
func TestRemoveReservedLUN(t *testing.T) {
	s := start(t)
	login := func(name string, luns ...uint16) *tt.Session {
		return tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:" + name},
			luns...)
	}
	holder, other := login("holder", 1, 2), login("other", 1, 2)
	register := func(sess *tt.Session, lun uint16, key uint64) {
		sess.MustGood(t, tt.PersistOut(lun, tt.Persist{Action: tt.PersistRegister, ActionKey: key}))
	}
	register(holder, 1, 1)
	register(holder, 2, 1)
	register(other, 2, 2)
	holder.MustGood(t, tt.PersistOut(2, tt.Persist{Action: tt.PersistReserve, Key: 1,
		Type: tt.WriteExclusiveRO}))
	_ = holder.Conn.Close()
	_ = other.Conn.Close()
	users := func(lun uint16) []string {
		_, err := s.inUse.RemoveUnused(lun)
		var used *serving.InUseError
		if errors.As(err, &used) {
			return used.Initiators
		}
		require.NoError(t, err)
		return nil
	}
	testtool.Eventually(t,
		func() bool { return users(1) == nil }, "a registration does not keep the LUN")
	testtool.Eventually(t, func() bool {
		return slices.Equal([]string{"iqn.2026-01.test:holder"}, users(2))
	}, "the holder keeps the LUN")
	other = login("other", 2)
	other.MustGood(t, tt.PersistOut(2, tt.Persist{Action: tt.PersistClear, Key: 2}))
	_ = other.Conn.Close()
	testtool.Eventually(t, func() bool { return users(2) == nil }, "nobody holds it any more")
}
