package target_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// numbered is a TEST UNIT READY with a CmdSN of the test's choice.
func numbered(sess *Session, cmdSN uint32, immediate bool) *pdu.SCSICommand {
	return &pdu.SCSICommand{Immediate: immediate, Final: true, Attr: pdu.TaskAttrSimple,
		LUN: LUN(1), TaskTag: sess.NewTag(), CmdSN: cmdSN, ExpStatSN: sess.ExpStatSN}
}

// done receives a SCSI Response with GOOD for a command.
func done(t *testing.T, sess *Session, cmd *pdu.SCSICommand) pdu.SCSIResponse {
	t.Helper()
	r, _ := testtool.Must2(Expect[pdu.SCSIResponse](sess.Conn))(t)
	require.Equal(t, cmd.TaskTag, r.TaskTag)
	require.Zero(t, r.Status)
	return r
}

func TestCmdSN(t *testing.T) {
	s := start(t)
	t.Run("4.2.2.1/counts on from 0xfffffff8", func(t *testing.T) {
		sess := s.login(t, LoginOptions{CmdSN: 0xfffffff8})
		for range 300 {
			sess.MustGood(t, TestUnitReady(1))
			require.Equal(t, sess.CmdSN, sess.ExpCmdSN)
		}
	})
	t.Run("4.2.2.1/a duplicate is ignored in silence", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		sess.MustGood(t, TestUnitReady(1))
		require.NoError(t, sess.Send(numbered(sess, sess.CmdSN-1, false), nil))
		require.NoError(t, sess.ExpectOnlyPing())
		require.Equal(t, sess.CmdSN, sess.ExpCmdSN)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("4.2.2.1/a duplicate does not run, and its data is skipped", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		sess.MustGood(t, Write10(1, 9, pattern(BlockSize, 1)))
		cmd, immediate, _ := sess.Prepare(Write10(1, 9, pattern(BlockSize, 2)))
		cmd.CmdSN -= 2
		sess.CmdSN--
		require.NoError(t, sess.Send(&cmd, immediate))
		require.NoError(t, sess.ExpectOnlyPing())
		require.Equal(t, pattern(BlockSize, 1), sess.MustGood(t, Read10(1, 9, 1)).Data)
	})
	t.Run("4.2.2.1/outside the window is ignored in silence", func(t *testing.T) {
		for _, off := range []uint32{1, 1000, 1 << 30} {
			sess := s.login(t, LoginOptions{})
			require.NoError(t, sess.Send(numbered(sess, sess.MaxCmdSN+off, false), nil))
			require.NoError(t, sess.ExpectOnlyPing())
			sess.MustGood(t, TestUnitReady(1))
		}
	})
	t.Run("4.2.2.1/a command ahead of its turn waits for those before it", func(t *testing.T) {
		sess := s.login(t, LoginOptions{CmdSN: 0xfffffffe})
		a, b, c := numbered(sess, sess.CmdSN, false), numbered(sess, sess.CmdSN+1, false),
			numbered(sess, sess.CmdSN+2, false)
		require.NoError(t, sess.Send(c, nil))
		require.NoError(t, sess.Send(b, nil))
		require.NoError(t, sess.ExpectOnlyPing())
		require.NoError(t, sess.Send(a, nil))
		done(t, sess, a)
		done(t, sess, b)
		last := done(t, sess, c)
		require.Equal(t, c.CmdSN+1, last.ExpCmdSN)
	})
	t.Run("4.2.2.1/writes run in the order of their numbers, too", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		first, firstData, _ := sess.Prepare(Write10(1, 70, pattern(BlockSize, 1)))
		second, secondData, _ := sess.Prepare(Write10(1, 70, pattern(BlockSize, 2)))
		require.NoError(t, sess.Send(&second, secondData))
		require.NoError(t, sess.Send(&first, firstData))
		done(t, sess, &first)
		done(t, sess, &second)
		require.Equal(t, pattern(BlockSize, 2), sess.MustGood(t, Read10(1, 70, 1)).Data)
	})
	t.Run("4.2.2.1/immediate commands use up no number", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		for range 10 {
			c := TestUnitReady(1)
			c.Immediate = true
			before := sess.ExpCmdSN
			sess.MustGood(t, c)
			require.Equal(t, before, sess.ExpCmdSN)
		}
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		require.Equal(t, sess.CmdSN, sess.ExpCmdSN)
		tag := testtool.Must(sess.SendPing(false, nil))(t)
		require.NoError(t, testtool.Err(sess.AwaitPing(tag)))
		require.Equal(t, sess.CmdSN, sess.ExpCmdSN, "a NOP-Out that is not immediate does")
	})
	t.Run("4.2.2.1/immediate commands overtake", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		late := numbered(sess, sess.CmdSN+1, false)
		require.NoError(t, sess.Send(late, nil))
		now := numbered(sess, sess.CmdSN, true)
		require.NoError(t, sess.Send(now, nil))
		done(t, sess, now)
		early := numbered(sess, sess.CmdSN, false)
		require.NoError(t, sess.Send(early, nil))
		done(t, sess, early)
		done(t, sess, late)
	})
	t.Run("11.2.1.8/a task tag in use", func(t *testing.T) {
		sess := s.login(t, solicited)
		task, r2t := waiting(t, sess, 1, 0, pattern(BlockSize, 1))
		again := numbered(sess, sess.CmdSN, false)
		again.TaskTag = task.Tag()
		require.NoError(t, sess.Send(again, nil))
		r := testtool.Must(sess.AwaitReject(task.Tag()))(t)
		require.Equal(t, pdu.RejectTaskInProgress, r.Reason)
		require.Equal(t, again.CmdSN, sess.ExpCmdSN,
			"7.3: a rejected number does not count as received")
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good(), "the task that has the tag goes on")
		sess.MustGood(t, TestUnitReady(1))
	})
	s.works(t)
}

// stall makes every call of a kind to the disk of LUN 1 wait until release is called, as the end of
// the test does, too; hangs waits until that many more calls are there.
func (s *server) stall(t *testing.T, op disktest.Op) (release func(), hangs func(calls int)) {
	t.Helper()
	before := s.disks[0].Calls(op)
	block := make(chan struct{})
	remove := s.disks[0].Inject(disktest.Rule{Op: op, Block: block})
	release = sync.OnceFunc(func() {
		remove()
		close(block)
	})
	t.Cleanup(release)
	return release, func(calls int) {
		t.Helper()
		testtool.Eventually(t, func() bool { return s.disks[0].Calls(op) >= before+calls },
			"the disk hangs")
	}
}

func TestCommandWindow(t *testing.T) {
	const width = 8
	s := start(t, limits(target.Limits{CommandWindow: width}))
	sess := s.login(t, LoginOptions{})
	require.Equal(t, sess.ExpCmdSN+width-1, sess.MaxCmdSN,
		"4.2.2.1: the window has its configured width")

	release, hangs := s.stall(t, disktest.OpRead)
	var tasks []*Task
	for range width {
		tasks = append(tasks, sess.MustStart(t, Read10(1, 0, 1)))
	}
	hangs(width)
	require.NoError(t, testtool.Err(sess.Ping(nil)))
	require.Equal(t, sess.ExpCmdSN-1, sess.MaxCmdSN, "the window is closed")

	t.Run("4.2.2.1/beyond a closed window is ignored", func(t *testing.T) {
		require.NoError(t, sess.Send(numbered(sess, sess.CmdSN, false), nil))
		require.NoError(t, sess.ExpectOnlyPing())
	})
	t.Run("4.2.2.1/a closed window still takes one task management request", func(t *testing.T) {
		r := testtool.Must(sess.TaskManagement(pdu.TaskManagementRequest{Immediate: true,
			Function: pdu.TMAbortTask, LUN: LUN(1),
			RefTaskTag: 0x7fff0000, RefCmdSN: sess.CmdSN - 1000}))(t)
		require.Equal(t, pdu.TMTaskNotExist, r)
	})
	t.Run("4.2.2.1/a closed window still takes one other immediate command", func(t *testing.T) {
		c := TestUnitReady(1)
		c.Immediate = true
		sess.MustGood(t, c)
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		require.Equal(t, sess.ExpCmdSN-1, sess.MaxCmdSN, "its end does not open the window")
	})
	t.Run("4.2.2.1/too many immediate commands are rejected", func(t *testing.T) {
		var started []*Task
		for range 200 {
			c := Read10(1, 0, 1)
			c.Immediate = true
			started = append(started, sess.MustStart(t, c))
		}
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		rejected := 0
		for _, p := range sess.Inbox() {
			require.Equal(t, pdu.OpReject, p.Header.Opcode())
			require.Equal(t, pdu.RejectImmediate, pdu.RejectReason(p.Header[2]))
			h := pdu.Header(p.Data[:pdu.HeaderLen])
			for i, task := range started {
				if task.Tag() == h.TaskTag() {
					sess.Forget(task)
					started = append(started[:i:i], started[i+1:]...)
					break
				}
			}
			rejected++
		}
		require.Positive(t, rejected)
		require.Positive(t, len(started))
		tasks = append(tasks, started...)
	})
	release()
	for _, task := range tasks {
		require.True(t, task.MustFinish(t).Good())
	}
	t.Run("4.2.2.1/the window opens again", func(t *testing.T) {
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		require.Equal(t, sess.ExpCmdSN+width-1, sess.MaxCmdSN)
		for range 3 * width {
			sess.MustGood(t, TestUnitReady(1))
		}
	})
}

// TestCommandWindowWithoutCommands checks that every numbered request takes a place in the window
// and gives it back, also if no SCSI command ever ends.
func TestCommandWindowWithoutCommands(t *testing.T) {
	const width = 4
	s := start(t, limits(target.Limits{CommandWindow: width}))
	t.Run("4.2.2.1/pings", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		for range 3 * width {
			tag := testtool.Must(sess.SendPing(false, nil))(t)
			require.NoError(t, testtool.Err(sess.AwaitPing(tag)))
			require.Equal(t, sess.ExpCmdSN+width-1, sess.MaxCmdSN,
				"the window is as wide as before")
		}
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("4.2.2.1/task management", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		for range 3 * width {
			r, err := sess.TaskManagement(pdu.TaskManagementRequest{Function: pdu.TMAbortTaskSet,
				LUN: LUN(1)})
			require.NoError(t, err)
			require.Equal(t, pdu.TMComplete, r)
		}
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("4.2.2.1/text in a discovery session", func(t *testing.T) {
		sess := testtool.Must(Login(s.addr, LoginOptions{Discovery: true}))(t)
		defer sess.Close()
		for range 3 * width {
			require.NoError(t, testtool.Err(sess.Text(KV("SendTargets", "All"))))
		}
	})
}
