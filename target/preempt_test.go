package target_test

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// fence is a PREEMPT AND ABORT of key 2 by key 1.
var fence = Persist{Action: PersistPreemptAndAbort, Type: WriteExclusiveRO, Key: 1, ActionKey: 2}

// fencing returns a target with two initiators, registered with keys 1 and 2. The second one has
// reserved LUN 1, and the target must ask for all its data.
func fencing(t *testing.T) (s *server, sess, second *Session) {
	t.Helper()
	s = start(t)
	sess = s.login(t, LoginOptions{})
	second = s.login(t, LoginOptions{Initiator: other.Initiator, ISID: other.ISID,
		Keys: solicited.Keys})
	register(t, sess, 1, 0)
	register(t, second, 2, 0)
	second.MustGood(t, PersistOut(1,
		Persist{Action: PersistReserve, Type: WriteExclusiveRO, Key: 2}))
	return s, sess, second
}

func TestPreempt(t *testing.T) {
	data := pattern(8*BlockSize, 2)
	t.Run("SPC-4 5.13.11.5/PREEMPT AND ABORT ends commands that wait for data", func(t *testing.T) {
		_, sess, second := fencing(t)
		one, oneR2T := waiting(t, second, 1, 0, data)
		flat, flatR2T := func() (*Task, pdu.R2T) { // the same LUN, addressed in another way
			c := Write10(1, 100, data)
			c.OnR2T, c.Edit = HoldR2T, func(cmd *pdu.SCSICommand) { cmd.LUN = 0x4001 << 48 }
			task := second.MustStart(t, c)
			return task, testtool.Must(task.AwaitR2T())(t)
		}()
		elsewhere, elsewhereR2T := waiting(t, second, 2, 0, data)
		before := sess.MustGood(t, Read10(1, 0, 8)).Data
		sess.MustGood(t, PersistOut(1, fence))
		quiet(t, second, one, oneR2T)
		quiet(t, second, flat, flatR2T)
		require.NoError(t, elsewhere.Answer(elsewhereR2T))
		require.True(t, elsewhere.MustFinish(t).Good(), "another LUN")
		require.Equal(t, []string{"06/2A/05"}, attentions(t, second, 1))
		second.MustFail(t, Write10(1, 0, data), reserved)
		require.Equal(t, before, sess.MustGood(t, Read10(1, 0, 8)).Data)
	})
	t.Run("SPC-4 5.13.11.5/PREEMPT AND ABORT waits for writes in the disk", func(t *testing.T) {
		s, sess, second := fencing(t)
		release, hangs := s.stall(t, disktest.OpWrite)
		stuck := second.MustStart(t, Write10(1, 0, data))
		require.NoError(t, testtool.Err(second.Ping(nil))) // answers the R2T on the way
		hangs(1)
		task := sess.MustStart(t, PersistOut(1, fence))
		testtool.Eventually(t,
			func() bool { return len(keysOf(t, sess)) == 1 }, "the registration is gone")
		require.False(t, task.Done(), "no answer while the write is under way")
		sess.MustGood(t, Write10(2, 0, data))
		second.Forget(stuck)
		require.NoError(t, second.ExpectOnlyPing())
		require.Equal(t, []string{"06/2A/05"}, attentions(t, second, 1))
		second.MustFail(t, Write10(1, 0, data), reserved)
		require.False(t, task.Done())
		release()
		require.True(t, task.MustFinish(t).Good())
		require.NoError(t, second.ExpectOnlyPing(), "no answer to what was aborted")
		sess.MustGood(t, Write10(1, 0, pattern(8*BlockSize, 5)))
		require.Equal(t, pattern(8*BlockSize, 5), sess.MustGood(t, Read10(1, 0, 8)).Data)
	})
	t.Run("SPC-4 5.13.11.5/PREEMPT AND ABORT waits for writes of an ended session",
		func(t *testing.T) {
			s, sess, second := fencing(t)
			release, hangs := s.stall(t, disktest.OpWrite)
			second.MustStart(t, Write10(1, 0, data))
			require.NoError(t, testtool.Err(second.Ping(nil)))
			hangs(1)
			require.NoError(t, second.Close())
			testtool.Eventually(t,
				func() bool { return s.seen.count("ended") == 1 }, "the session ends")
			task := sess.MustStart(t, PersistOut(1, fence))
			testtool.Eventually(t,
				func() bool { return len(keysOf(t, sess)) == 1 }, "the registration is gone")
			require.NoError(t, sess.ExpectOnlyPing())
			require.False(t, task.Done())
			release()
			require.True(t, task.MustFinish(t).Good())
		})
	t.Run("SPC-4 5.13.11.5/two initiators fence each other", func(t *testing.T) {
		for range 20 {
			s := start(t)
			a, b := s.login(t, LoginOptions{}), s.login(t, other)
			register(t, a, 1, 0)
			register(t, b, 2, 0)
			toA := a.MustStart(t, PersistOut(1, fence))
			toB := b.MustStart(t,
				PersistOut(1, Persist{Action: PersistPreemptAndAbort, Type: WriteExclusiveRO,
					Key: 2, ActionKey: 1}))
			// The first one wins. The other one's command conflicts, fails with a unit attention,
			// or is aborted.
			require.NoError(t, testtool.Err(a.Ping(nil)))
			require.NoError(t, testtool.Err(b.Ping(nil)))
			a.Forget(toA)
			b.Forget(toB)
			attentions(t, a, 1)
			attentions(t, b, 1)
			require.Len(t, keysOf(t, a), 1)
		}
	})
}

// hungPanic is a disk with a bug, which hangs before.
type hungPanic struct {
	*disktest.Memory
	entered, release chan struct{}
}

func (p hungPanic) WriteAt(context.Context, []byte, int64) (int, error) {
	close(p.entered)
	<-p.release
	panic("a bug in the disk")
}

// TestPreemptOfPanic checks that PREEMPT AND ABORT does not wait for a write that ended in a panic.
func TestPreemptOfPanic(t *testing.T) {
	d := hungPanic{disktest.NewMemory(diskSize), make(chan struct{}), make(chan struct{})}
	s := start(t, func(o *options) { o.LUNs[0].Disk = d })
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	register(t, sess, 1, 0)
	register(t, second, 2, 0)
	second.MustStart(t, Write10(1, 0, pattern(BlockSize, 1)))
	<-d.entered
	task := sess.MustStart(t, PersistOut(1, fence))
	testtool.Eventually(t,
		func() bool { return len(keysOf(t, sess)) == 1 }, "the registration is gone")
	require.False(t, task.Done())
	close(d.release)
	require.True(t, task.MustFinish(t).Good())
	// The write ends before its goroutine reports the bug.
	testtool.Eventually(t, func() bool { return s.seen.count("panic") == 1 }, "the bug is counted")
	s.bugs = 1
}

// reserved is the status of a command that conflicts with a reservation.
const reserved = "status 0x18"

// register registers a key for the session, whatever key it had.
func register(t *testing.T, sess *Session, key uint64, bits uint8) {
	t.Helper()
	sess.MustGood(t, PersistOut(1,
		Persist{Action: PersistRegisterIgnore, ActionKey: key, Bits: bits}))
}

// keysOf returns the registered keys of LUN 1.
func keysOf(t *testing.T, sess *Session) (keys []uint64) {
	t.Helper()
	p := sess.MustGood(t, PersistIn(1, ReadKeys, 4096)).Data
	require.EqualValues(t, len(p)-8, binary.BigEndian.Uint32(p[4:]))
	for p = p[8:]; len(p) > 0; p = p[8:] {
		keys = append(keys, binary.BigEndian.Uint64(p))
	}
	return keys
}

// TestReservationsKnowTheInitiatorPort: name and ISID of a login are the port that is registered.
func TestReservationsKnowTheInitiatorPort(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	register(t, sess, 1, 0)
	sess.MustGood(t, PersistOut(1, Persist{Action: PersistReserve, Type: WriteExclusive, Key: 1}))
	twin := s.login(t, LoginOptions{ISID: [6]byte{0x80, 7}})
	twin.MustFail(t, Write10(1, 0, pattern(BlockSize, 1)), reserved)
	id := append([]byte{0x45, 0, 0, 52},
		append([]byte(DefaultInitiator), ",i,0x800000000000\x00"...)...)
	require.Equal(t, id, twin.MustGood(t, PersistIn(1, ReadFullStatus, 4096)).Data[32:])
	require.NoError(t, sess.Close())
	sess = s.login(t, LoginOptions{})
	sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	s.works(t)
}

// slowStore fails to save, and takes long for that.
type slowStore struct{ entered, release chan struct{} }

func (slowStore) Load(string) ([]byte, error) { return nil, nil }
func (slowStore) Where(name string) string    { return name }

func (s slowStore) Save(string, []byte) error {
	close(s.entered)
	<-s.release
	return nil
}

func TestPersistentReservationsWithSlowStore(t *testing.T) {
	store := slowStore{make(chan struct{}), make(chan struct{})}
	s := start(t, func(o *options) { o.LUNs[0].Store = store })
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	task := sess.MustStart(t, PersistOut(1,
		Persist{Action: PersistRegister, ActionKey: 1, Bits: APTPL}))
	<-store.entered
	for _, one := range []*Session{sess, second} {
		require.NoError(t, testtool.Err(one.Ping(nil)))
		one.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	}
	require.Empty(t, keysOf(t, second), "a registration that is not stored is not in force")
	require.False(t, task.Done())
	close(store.release)
	require.True(t, task.MustFinish(t).Good())
	require.Equal(t, []uint64{1}, keysOf(t, second))
	s.works(t)
}

// TestResetOfSomebodyElsesLUN checks that an initiator that may not use a write-exclusive LUN
// cannot end the commands of its owner. The kernel of a machine tries that after a guest has
// migrated away. It is refused, and the commands go on (RFC 7143 11.5.1, 11.6.1).
func TestResetOfSomebodyElsesLUN(t *testing.T) {
	s := start(t, func(o *options) { o.LUNs[0].Access = serving.AccessWriteExclusive })
	data := pattern(8*BlockSize, 1)
	named := func(name string, isid byte) *Session {
		return s.login(t, LoginOptions{Initiator: DefaultInitiator + name,
			ISID: [6]byte{0x80, isid}, Keys: solicited.Keys})
	}
	first, second, third := named(".first", 1), named(".second", 2), named(".third", 3)
	functions := []pdu.TMFunction{pdu.TMClearTaskSet, pdu.TMLogicalUnitReset, pdu.TMTargetWarmReset,
		pdu.TMTargetColdReset}
	refused := func(t *testing.T, owner *Session, by ...*Session) {
		task, r2t := waiting(t, owner, 1, 0, data)
		for _, sess := range by {
			for _, function := range functions {
				manageAll(t, sess, pdu.TMAuthorizationFailed, function)
			}
			// its own tasks
			manageAll(t, sess, pdu.TMComplete, pdu.TMAbortTaskSet)
			manage(t, sess, pdu.TMComplete,
				pdu.TaskManagementRequest{Function: pdu.TMLogicalUnitReset, LUN: LUN(2)})
		}
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good())
		require.Empty(t, attentions(t, owner, 1))
		attentions(t, owner, 2)
	}

	first.MustGood(t, Write10(1, 0, data))
	t.Run("another initiator's", func(t *testing.T) { refused(t, first, second, third) })
	require.NoError(t, s.inUse.Admit(1, DefaultInitiator+".second", time.Time{}))
	require.NoError(t, testtool.Err(s.inUse.HandOver(1)))
	t.Run("after a handover", func(t *testing.T) { refused(t, second, first, third) })
	t.Run("the owner itself", func(t *testing.T) {
		for _, function := range functions[:3] {
			manageAll(t, second, pdu.TMComplete, function)
		}
		attentions(t, second, 1)
		attentions(t, second, 2)
	})
	t.Run("nobody's", func(t *testing.T) {
		require.NoError(t, testtool.Err(second.Logout(pdu.LogoutCloseSession)))
		manageAll(t, first, pdu.TMAuthorizationFailed, pdu.TMLogicalUnitReset)
		manageAll(t, third, pdu.TMComplete, pdu.TMLogicalUnitReset)
	})
	t.Run("opened again by a handover", func(t *testing.T) {
		require.NoError(t, s.inUse.Admit(1, DefaultInitiator+".first", time.Time{}))
		manageAll(t, first, pdu.TMComplete, pdu.TMLogicalUnitReset)
		attentions(t, first, 1)
		first.MustGood(t, Write10(1, 0, data))
	})
}
