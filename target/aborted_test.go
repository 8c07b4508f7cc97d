package target_test

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// halfSent starts a write to LUN 1. The target gets the command and a part of its immediate data.
// The returned function sends the rest.
func halfSent(t *testing.T, s *server, sess *Session, data []byte,
	edit ...func(*pdu.SCSICommand)) (task *Task, finish func()) {
	t.Helper()
	const sent = pdu.HeaderLen + 100
	c := Write10(1, 0, data)
	for _, f := range edit {
		c.Edit = f
	}
	c.Options = []Option{CutAfter(sent)}
	task = sess.MustStart(t, c)
	testtool.Eventually(t, func() bool {
		for _, i := range s.Sessions() {
			if i.Local == s.addr.String() && i.Remote == sess.LocalAddr().String() {
				return i.InFlight == 1
			}
		}
		return false
	}, "the command has arrived")
	return task, func() { require.NoError(t, sess.SendRaw(data[sent-pdu.HeaderLen:])) }
}

// TestAbortedWhileItsDataArrives ends writes while the target receives a data segment of theirs.
// Nothing of them may be written any more: another initiator knows that they have ended, and has
// written the same blocks since.
func TestAbortedWhileItsDataArrives(t *testing.T) {
	stale, fresh := pattern(8*BlockSize, 1), pattern(8*BlockSize, 2)
	for _, c := range []struct {
		name string
		end  func(t *testing.T, sess *Session)
	}{
		{"SAM-5 7.7/LOGICAL UNIT RESET", func(t *testing.T, sess *Session) {
			manageAll(t, sess, pdu.TMComplete, pdu.TMLogicalUnitReset)
			attentions(t, sess, 1)
		}},
		{"SAM-5 7.4/CLEAR TASK SET", func(t *testing.T, sess *Session) {
			manageAll(t, sess, pdu.TMComplete, pdu.TMClearTaskSet)
		}},
		{"11.5.1/TARGET WARM RESET", func(t *testing.T, sess *Session) {
			manage(t, sess, pdu.TMComplete,
				pdu.TaskManagementRequest{Function: pdu.TMTargetWarmReset})
			attentions(t, sess, 1)
		}},
		{"SPC-4 5.13.11.5/PREEMPT AND ABORT",
			func(t *testing.T, sess *Session) { sess.MustGood(t, PersistOut(1, fence)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t)
			sess, second := s.login(t, LoginOptions{}), s.login(t, other)
			register(t, sess, 1, 0)
			register(t, second, 2, 0)
			task, finish := halfSent(t, s, second, stale)
			c.end(t, sess)
			sess.MustGood(t, Write10(1, 0, fresh))
			finish()
			second.Forget(task)
			require.NoError(t, second.ExpectOnlyPing(), "no answer to the aborted command")
			require.True(t, bytes.Equal(fresh, sess.MustGood(t, Read10(1, 0, 8)).Data),
				"an aborted write has overwritten a later one")
		})
	}
}

// TestAbortedBeforeTheRestOfItsData ends a write while the target receives a data segment and more
// is to come. When the segment has arrived, its place in the command window is free. Otherwise
// enough of them would close the window for ever.
func TestAbortedBeforeTheRestOfItsData(t *testing.T) {
	const width = 4
	s := start(t, limits(target.Limits{CommandWindow: width}))
	sess, neighbour := s.login(t,
		LoginOptions{Keys: KV("InitialR2T", "No", "ImmediateData", "Yes")}), s.login(t, other)
	task, finish := halfSent(t, s, sess, pattern(8*BlockSize, 1),
		func(cmd *pdu.SCSICommand) { cmd.Final = false })
	manageAll(t, neighbour, pdu.TMComplete, pdu.TMLogicalUnitReset)
	finish()
	sess.Forget(task)
	attentions(t, sess, 1)
	sess.MustGood(t, TestUnitReady(1))
	require.Equal(t, sess.CmdSN-1+width, sess.MaxCmdSN)
}

// TestAbortedBetweenItsBursts ends a write while the disk works on its first burst. The target does
// not ask for the second one, and the place in the command window is free.
func TestAbortedBetweenItsBursts(t *testing.T) {
	const width = 4
	s := start(t, limits(target.Limits{CommandWindow: width}))
	sess := s.login(t, solicited)
	release, hangs := s.stall(t, disktest.OpWrite)
	write, r2t := waiting(t, sess, 1, 0, pattern(1<<20, 1))
	require.NoError(t, write.Answer(r2t))
	hangs(1)
	aborts(t, sess, write)
	release()
	testtool.Eventually(t, func() bool {
		require.NoError(t, sess.ExpectOnlyPing(), "no R2T and no answer")
		return sess.MaxCmdSN == sess.CmdSN-1+width
	}, "it has ended")
	sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 2)))
}

// TestTagOfAnAbortedCommand aborts a command that the disk still works on, and uses its tag for
// another one. The second command runs when the first has ended.
func TestTagOfAnAbortedCommand(t *testing.T) {
	const width = 4
	s := start(t, limits(target.Limits{CommandWindow: width}))
	sess := s.login(t, solicited)
	release, hangs := s.stall(t, disktest.OpRead)
	read := sess.MustStart(t, Read10(1, 0, 1))
	hangs(1)
	aborts(t, sess, read)
	c := Write10(1, 8, pattern(BlockSize, 1))
	c.OnR2T, c.Edit = HoldR2T, func(cmd *pdu.SCSICommand) { cmd.TaskTag = read.Tag() }
	write := sess.MustStart(t, c)
	r2t := testtool.Must(write.AwaitR2T())(t)
	release()
	testtool.Eventually(t, func() bool {
		_, err := sess.Ping(nil)
		return err == nil && sess.MaxCmdSN == sess.CmdSN-1+width-1
	}, "the first one has ended")
	require.NoError(t, write.Answer(r2t))
	require.True(t, write.MustFinish(t).Good())
}

// endsSession is a disk that keeps its first write waiting until the session of the write has
// ended.
type endsSession struct {
	*disktest.Memory
	writes atomic.Int32
	begun  chan struct{}
	resume chan struct{}
}

func (d *endsSession) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	if d.writes.Add(1) == 1 {
		close(d.begun)
		<-d.resume
	}
	return d.Memory.WriteAt(context.Background(), p, off)
}

// TestCommandsOfAnEndedSession sends commands in one piece, and reinstates their session while the
// first one is in the disk. The target drops the others that it has received but not begun, because
// the initiator sends them again.
func TestCommandsOfAnEndedSession(t *testing.T) {
	stale, fresh := pattern(BlockSize, 1), pattern(BlockSize, 2)
	for range 10 {
		d := &endsSession{Memory: disktest.NewMemory(diskSize), begun: make(chan struct{}),
			resume: make(chan struct{})}
		s := start(t, func(o *options) { o.LUNs[0].Disk = d })
		old := s.login(t, LoginOptions{})
		var raw []byte
		for lba := range uint32(8) {
			cmd, data, _ := old.Prepare(Write10(1, lba, stale))
			raw = append(raw, old.Bytes(&cmd, data)...)
		}
		require.NoError(t, old.SendRaw(raw))
		<-d.begun
		sess := s.login(t, LoginOptions{})
		sess.MustGood(t, Write10(1, 7, fresh))
		close(d.resume)
		require.NoError(t, s.Close())
		got := make([]byte, BlockSize)
		require.NoError(t, testtool.Err(d.ReadAt(t.Context(), got, 7*BlockSize)))
		require.True(t, bytes.Equal(fresh, got),
			"a command of the former session has overwritten a later write")
	}
}
