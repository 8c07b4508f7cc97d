package target_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
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

// TestFirstUseAndRemoval: if a first command and the removal of an unused LUN coincide, one of them
// wins. Some initiators are logged in, and some log in at that moment.
func TestFirstUseAndRemoval(t *testing.T) {
	const rounds = 100
	s := start(t)
	var there []*tt.Session
	for i := range 2 {
		there = append(there, tt.MustLogin(t, s.addr,
			tt.LoginOptions{Initiator: fmt.Sprint("iqn.2026-01.test:", i)}, 2))
	}
	removed, kept := 0, 0
	for round := range rounds {
		lun := uint16(10 + round) // a number that nobody has used
		require.NoError(t, s.inUse.Add(serving.Options{Number: lun, Name: "once",
			Disk: disktest.NewMemory(stormSize), Identity: stormIdentity(uint64(lun)),
			Access: serving.AccessWriteShared}))
		for _, sess := range there {
			r, err := again(sess, tt.TestUnitReady(lun))
			require.NoError(t, err)
			require.True(t, r.Good(), r.Failed())
		}
		reads, removal := meet(t, s, there, lun, round)
		var used *serving.InUseError
		switch {
		case removal == nil:
			removed++
			for _, r := range reads {
				require.Equal(t, "05/25/00", r.Failed(), "round %d", round)
			}
		case errors.As(removal, &used):
			kept++
			require.NotEmpty(t, used.Initiators)
			for _, r := range reads {
				require.True(t, r.Good(), "round %d: %s", round, r.Failed())
			}
			_, err := s.inUse.Remove(lun)
			require.NoError(t, err)
		default:
			require.NoError(t, removal)
		}
	}
	t.Logf("%d LUNs were removed, and %d stayed", removed, kept)
}

// meet has initiators read a LUN for the first time while it is removed.
func meet(t *testing.T, s *server, there []*tt.Session, lun uint16, round int) (reads []*tt.Result,
	removal error) {
	t.Helper()
	var all sync.WaitGroup
	begin := make(chan struct{})
	var late *tt.Session
	errs := make([]error, len(there)+1)
	reads = make([]*tt.Result, len(there)+1)
	for i, sess := range there {
		all.Go(func() {
			<-begin
			reads[i], errs[i] = again(sess, tt.Read10(lun, 0, 1))
		})
	}
	all.Go(func() {
		<-begin
		i := len(there)
		if late, errs[i] = tt.Login(s.addr, tt.LoginOptions{
			Initiator: fmt.Sprint("iqn.2026-01.test:new", round)}); errs[i] == nil {
			reads[i], errs[i] = again(late, tt.Read10(lun, 0, 1))
		}
	})
	all.Go(func() {
		<-begin
		_, removal = s.inUse.RemoveUnused(lun)
	})
	close(begin)
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	_ = late.Conn.Close()
	return reads, removal
}
