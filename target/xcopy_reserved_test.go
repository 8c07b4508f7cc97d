package target_test

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	. "kubevirt.io/disk/target/targettest"
)

// TestExtendedCopyAndReservations copies from and to LUN 1, which another session has reserved, by
// a command to LUN 2. A copy may do what a READ and a WRITE of the same session may do.
func TestExtendedCopyAndReservations(t *testing.T) {
	from, to := CopyList(1, units, segment(0, 1, 8, 0, 0)),
		CopyList(1, units, segment(1, 0, 8, 0, 0))
	for _, c := range []struct {
		name string
		kind uint8
		// whether everybody can read, and whether registered initiators can do everything
		reads, registered bool
	}{
		{"Write Exclusive", WriteExclusive, true, false},
		{"Exclusive Access", ExclusiveAccess, false, false},
		{"Write Exclusive, Registrants Only", WriteExclusiveRO, true, true},
		{"Exclusive Access, All Registrants", ExclusiveAccessShared, false, true},
	} {
		t.Run("SPC-4 5.13.3/"+c.name, func(t *testing.T) {
			s := start(t)
			sess, second := s.login(t, LoginOptions{}), s.login(t, other)
			register(t, sess, 1, 0)
			sess.MustGood(t, PersistOut(1, Persist{Action: PersistReserve, Type: c.kind, Key: 1}))
			sess.MustGood(t, Write10(1, 0, pattern(8*BlockSize, 1)))
			check := func(all bool) {
				t.Helper()
				r := second.MustDo(t, ExtendedCopy(2, from))
				if c.reads || all {
					require.True(t, r.Good(), r.Failed())
				} else {
					require.Equal(t, "0A/0D/01", r.Failed())
				}
				r = second.MustDo(t, ExtendedCopy(2, to))
				if all {
					require.True(t, r.Good(), r.Failed())
					second.MustGood(t, ExtendedCopy(1, to))
				} else {
					require.Equal(t, "0A/0D/01", r.Failed())
					second.MustFail(t, ExtendedCopy(1, nil), reserved)
					require.Equal(t, pattern(8*BlockSize, 1),
						sess.MustGood(t, Read10(1, 0, 8)).Data)
				}
			}
			check(false)
			register(t, second, 2, 0)
			check(c.registered)
			sess.MustGood(t, ExtendedCopy(1, from))
			sess.MustGood(t, ExtendedCopy(2, to))
		})
	}
	t.Run("SPC-4 5.13.11/PREEMPT AND ABORT ends the writes of a copy from elsewhere",
		func(t *testing.T) {
			const blocks = 8192
			s := start(t)
			sess, second := s.login(t, LoginOptions{}), s.login(t, other)
			witness := s.login(t, LoginOptions{Initiator: DefaultInitiator + ".witness",
				ISID: [6]byte{0x80, 3}})
			register(t, sess, 1, 0)
			register(t, second, 2, 0)
			sess.MustGood(t, PersistOut(1,
				Persist{Action: PersistReserve, Type: WriteExclusiveRO, Key: 1}))
			sess.MustGood(t, Write10(2, 0, pattern(blocks*BlockSize, 1)))

			release := s.stall(t, disktest.OpWrite)
			before := s.disks[0].Calls(disktest.OpWrite)
			task := second.MustStart(t,
				ExtendedCopy(2, CopyList(1, units, segment(1, 0, blocks, 0, 0))))
			testtool.Eventually(t,
				func() bool { return s.disks[0].Calls(disktest.OpWrite) > before },
				"the disk hangs")
			preempt := sess.MustStart(t,
				PersistOut(1, Persist{Action: PersistPreemptAndAbort, Type: WriteExclusiveRO,
					Key: 1, ActionKey: 2}))
			testtool.Eventually(t,
				func() bool { return len(keysOf(t, witness)) == 1 }, "it is preempted")
			release()
			require.True(t, preempt.MustFinish(t).Good())
			written := s.disks[0].Calls(disktest.OpWrite)
			r := task.MustFinish(t)
			require.Equal(t, "0A/0D/01", r.Failed())
			require.EqualValues(t, blocks-512, binary.BigEndian.Uint32(r.Sense.Raw[3:]),
				"some blocks are not copied")
			require.Equal(t, written, s.disks[0].Calls(disktest.OpWrite),
				"nothing is written after the fence")
		})
}
