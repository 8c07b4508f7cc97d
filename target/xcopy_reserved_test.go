package target_test

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	. "kubevirt.io/disk/target/targettest"
)

// TestCopyFromElsewhereIsFenced: PREEMPT AND ABORT ends the writes of a copy that another LUN was
// asked for. Nothing is written after the fence (SPC-4 5.13.11).
func TestCopyFromElsewhereIsFenced(t *testing.T) {
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

	release, hangs := s.stall(t, disktest.OpWrite)
	task := second.MustStart(t,
		ExtendedCopy(2, CopyList(1, units, segment(1, 0, blocks, 0, 0))))
	hangs(1)
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
}
