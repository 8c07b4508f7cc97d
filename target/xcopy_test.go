package target_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// units are the designators of LUN 1 and 2 from VPD page 83h.
var units = [][8]byte{identity(1).NAA, identity(2).NAA}

// copyStatus reads the status, segments and bytes of a copy.
func copyStatus(t *testing.T, sess *Session, lun uint16, id byte) string {
	t.Helper()
	r := sess.MustDo(t, ReceiveCopyResults(lun, 0, id, 12))
	if !r.Good() {
		return r.Failed()
	}
	require.Len(t, r.Data, 12)
	return fmt.Sprintf("%d: %d segments, %d bytes", r.Data[4], binary.BigEndian.Uint16(r.Data[5:]),
		binary.BigEndian.Uint32(r.Data[8:]))
}

func TestExtendedCopy(t *testing.T) {
	s := start(t)
	data := pattern(1200*BlockSize, 1)
	s.login(t, LoginOptions{}).MustGood(t, Write10(1, 0, data))
	list := CopyList(1, units, segment(0, 1, 1000, 0, 64), segment(0, 1, 200, 1000, 5000),
		segment(1, 0xffff, 8, 64, 9000))

	for _, tt := range []struct {
		name string
		keys LoginOptions
		edit func(*Command)
	}{
		{"immediate data", LoginOptions{}, func(*Command) {}},
		{"solicited data", solicited, func(*Command) {}},
		{"data in many PDUs", LoginOptions{Keys: KV("MaxBurstLength", "512", "FirstBurstLength",
			"512", "ImmediateData", "No")}, func(*Command) {}},
		{"an immediate command", LoginOptions{}, func(c *Command) { c.Immediate = true }},
	} {
		t.Run("SPC-4 6.5/"+tt.name, func(t *testing.T) {
			sess := s.login(t, tt.keys)
			sess.MustGood(t, Write10(2, 0, make([]byte, 1200*BlockSize)))
			c := ExtendedCopy(1, list)
			tt.edit(&c)
			r := sess.MustGood(t, c)
			require.Zero(t, r.Residual)
			require.Equal(t, data[:1000*BlockSize], sess.MustGood(t, Read10(2, 64, 1000)).Data)
			require.Equal(t, data[1000*BlockSize:], sess.MustGood(t, Read10(2, 5000, 200)).Data)
			require.Equal(t, data[:8*BlockSize], sess.MustGood(t, Read10(1, 9000, 8)).Data)
			require.Equal(t, "1: 3 segments, 618496 bytes", copyStatus(t, sess, 1, 1))
			require.Equal(t, "05/24/00", copyStatus(t, sess, 1, 1), "its end is reported once")
		})
	}
	t.Run("SPC-4 6.5/a huge length for the parameter list", func(t *testing.T) {
		sess := s.login(t, solicited)
		c := ExtendedCopy(1, list)
		copy(c.CDB[10:], []byte{0x7f, 0xff, 0xff, 0xff})
		r := sess.MustFail(t, expecting(c, 0x7fffffff), "05/1A/00")
		require.Empty(t, r.R2Ts, "no R2T")
	})
	s.works(t)
}

// TestExtendedCopyIsStopped ends copies whose destination hangs. Everything else goes on meanwhile.
func TestExtendedCopyIsStopped(t *testing.T) {
	const blocks, to = 8192, 16384
	s := start(t)
	newer := bytes.Repeat([]byte{0x77}, BlockSize)
	s.login(t, LoginOptions{}).MustGood(t, Write10(1, 0, pattern(blocks*BlockSize, 5)))
	hang := func(t *testing.T, sess *Session, lun uint16) (task *Task, release func()) {
		release, hangs := s.stall(t, disktest.OpWrite)
		task = sess.MustStart(t,
			ExtendedCopy(lun, CopyList(1, units, segment(0, 0, blocks, 0, to))))
		hangs(1)
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		sess.MustGood(t, Write10(2, 0, newer))
		require.Equal(t, newer, sess.MustGood(t, Read10(2, 0, 1)).Data, "the other LUN goes on")
		require.Equal(t, pattern(BlockSize, 5), sess.MustGood(t, Read10(1, 0, 1)).Data,
			"reads of the destination go on, too")
		return task, release
	}
	// ended checks that a stopped copy writes nothing after the write that was under way: its last
	// blocks are unchanged.
	ended := func(t *testing.T, sess *Session) {
		calls := s.disks[0].Calls(disktest.OpWrite)
		sess.MustGood(t, Write10(1, to, newer)) // waits for the write that is under way
		require.Equal(t, newer, sess.MustGood(t, Read10(1, to, 1)).Data,
			"the copy does not overwrite a newer write")
		require.Equal(t, make([]byte, 8*BlockSize),
			sess.MustGood(t, Read10(1, to+blocks-8, 8)).Data)
		require.Equal(t, calls+1, s.disks[0].Calls(disktest.OpWrite))
	}
	for _, tt := range []struct {
		name string
		stop pdu.TMFunction
	}{
		{"11.5.1/ABORT TASK SET", pdu.TMAbortTaskSet},
		{"11.5.1/CLEAR TASK SET", pdu.TMClearTaskSet},
		{"11.5.1/LOGICAL UNIT RESET", pdu.TMLogicalUnitReset},
		{"11.5.1/TARGET WARM RESET", pdu.TMTargetWarmReset},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			task, release := hang(t, sess, 1)
			manageAll(t, sess, pdu.TMComplete, tt.stop)
			sess.Forget(task)
			release()
			require.NoError(t, testtool.Err(sess.ClearAttention(1)))
			ended(t, sess)
			require.NoError(t, sess.ExpectOnlyPing(), "no answer for it")
			// Its goroutine releases the blocks before it forgets the copy.
			testtool.Eventually(t, func() bool { return copyStatus(t, sess, 1, 1) == "05/24/00" },
				"the copy is forgotten")
		})
	}
	t.Run("11.6.1/ABORT TASK", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		task, release := hang(t, sess, 1)
		aborts(t, sess, task)
		release()
		ended(t, sess)
		require.NoError(t, sess.ExpectOnlyPing())
	})
	t.Run("SPC-4 6.5/a reset of the destination by somebody else", func(t *testing.T) {
		sess, neighbour := s.login(t, LoginOptions{}), s.login(t, other)
		task, release := hang(t, sess, 2)
		manageAll(t, neighbour, pdu.TMComplete, pdu.TMLogicalUnitReset)
		release()
		r := task.MustFinish(t)
		require.Equal(t, "0A/0D/01", r.Failed())
		require.EqualValues(t, blocks-512, binary.BigEndian.Uint32(r.Sense.Raw[3:]),
			"blocks are left")
		require.Equal(t, []string{"06/29/03"}, attentions(t, sess, 1))
		ended(t, sess)
	})
	t.Run("11.14/logout", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		_, release := hang(t, sess, 1)
		require.NoError(t, testtool.Err(sess.Logout(pdu.LogoutCloseSession)))
		require.NoError(t, sess.ExpectClosed())
		release()
		ended(t, s.login(t, other))
	})
	s.works(t)
}

// segment copies blocks from one logical unit to another or the same.
func segment(source, dest, blocks int, from, to uint64) CopySegment {
	return CopySegment{Source: source, Dest: dest, Blocks: blocks, From: from, To: to}
}

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
	sess.MustGood(t, PersistOut(1, Persist{Action: PersistReserve, Type: WriteExclusiveRO, Key: 1}))
	sess.MustGood(t, Write10(2, 0, pattern(blocks*BlockSize, 1)))

	release, hangs := s.stall(t, disktest.OpWrite)
	task := second.MustStart(t, ExtendedCopy(2, CopyList(1, units, segment(1, 0, blocks, 0, 0))))
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
