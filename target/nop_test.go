package target_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

func TestNOPOut(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{Keys: KV("MaxRecvDataSegmentLength", "4096")})
	t.Run("11.18/data is echoed", func(t *testing.T) {
		for _, n := range []int{0, 1, 2, 3, 4, 100, 4096} {
			echo := testtool.Must(sess.Ping(pattern(n, 1)))(t)
			require.Len(t, echo, n)
			require.Equal(t, string(pattern(n, 1)), string(echo))
		}
	})
	t.Run("11.18.3/as much data as the initiator takes", func(t *testing.T) {
		echo := testtool.Must(sess.Ping(pattern(8192, 1)))(t)
		require.Equal(t, pattern(4096, 1), echo)
	})
	t.Run("11.18.1/without a task tag there is no answer", func(t *testing.T) {
		require.NoError(t, sess.Send(&pdu.NOPOut{Immediate: true, TaskTag: pdu.ReservedTag,
			TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN,
			ExpStatSN: sess.ExpStatSN}, []byte("anyone there?")))
		require.NoError(t, sess.ExpectOnlyPing())
	})
	t.Run("11.18.1/without a task tag and not immediate", func(t *testing.T) {
		// This violates the standard. However the target handles it, commands go on.
		require.NoError(t, sess.Send(&pdu.NOPOut{TaskTag: pdu.ReservedTag,
			TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN, ExpStatSN: sess.ExpStatSN}, nil))
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		sess.Inbox()
		sess.CmdSN = sess.ExpCmdSN
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.18.2/an unknown transfer tag", func(t *testing.T) {
		require.NoError(t, sess.Send(&pdu.NOPOut{Immediate: true, TaskTag: pdu.ReservedTag,
			TransferTag: 4711, CmdSN: sess.CmdSN, ExpStatSN: sess.ExpStatSN}, nil))
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		sess.Inbox()
		sess.MustGood(t, TestUnitReady(1))
	})
	s.works(t)
}

// TestNOPOutWhileTheDiskStalls checks that a disk that hangs delays only the commands for it.
func TestNOPOutWhileTheDiskStalls(t *testing.T) {
	t.Parallel() // it mostly waits
	s := start(t)
	for _, tt := range []struct {
		name    string
		op      disktest.Op
		command Command
	}{
		{"read", disktest.OpRead, Read10(1, 0, 8)},
		{"write", disktest.OpWrite, Write10(1, 0, pattern(8*BlockSize, 1))},
		{"flush", disktest.OpFlush, SynchronizeCache10(1)},
	} {
		t.Run("11.18/"+tt.name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			release, hangs := s.stall(t, tt.op)
			var tasks []*Task
			for range 20 {
				tasks = append(tasks, sess.MustStart(t, tt.command))
			}
			hangs(1)
			for range 20 { // the disk does not answer before release
				require.NoError(t, testtool.Err(sess.Ping([]byte("still there?"))))
			}
			sess.MustGood(t, Read10(2, 0, 8)) // another LUN
			release()
			for _, task := range tasks {
				require.True(t, task.MustFinish(t).Good())
			}
		})
	}
}

func TestNOPIn(t *testing.T) {
	t.Parallel() // it mostly waits
	patient := func(timeout time.Duration) *server {
		return start(t, limits(target.Limits{NOPInterval: 100 * time.Millisecond,
			NOPTimeout: timeout}))
	}
	s := patient(time.Minute)
	t.Run("11.19/a peer that answers stays", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		for range 4 {
			in, _ := testtool.Must2(Expect[pdu.NOPIn](sess.Conn))(t)
			require.NoError(t,
				sess.Send(&pdu.NOPOut{Immediate: true, LUN: in.LUN, TaskTag: pdu.ReservedTag,
					TransferTag: in.TransferTag,
					CmdSN:       sess.CmdSN, ExpStatSN: sess.ExpStatSN}, nil))
		}
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.19/a peer that does not answer is dropped", func(t *testing.T) {
		s := patient(5 * time.Second) // enough for a login on a busy machine
		sess := s.login(t, LoginOptions{})
		list := testtool.Must(sess.ExpectClosedAfter())(t)
		require.Len(t, list, 1)
		require.Equal(t, pdu.OpNOPIn, list[0].Header.Opcode())
		testtool.Eventually(t,
			func() bool { return s.seen.count("ended timeout") > 0 }, "the session ends")
	})
}

func TestPDUDeadline(t *testing.T) {
	t.Parallel() // it mostly waits
	s := start(t, limits(target.Limits{PDUTimeout: 400 * time.Millisecond}))
	for name, n := range map[string]int{"a part of a header": 20, "a header without its data": 48,
		"a part of the data": 100} {
		t.Run(name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			require.NoError(t, testtool.Err(sess.SendPing(true, make([]byte, 200), CutAfter(n))))
			require.NoError(t, sess.ExpectClosed())
		})
	}
	t.Run("one byte at a time", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		b := sess.Bytes(&pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag},
			make([]byte, 300))
		for i := range b {
			if err := sess.SendRaw(b[i : i+1]); err != nil {
				require.ErrorIs(t, err, ErrClosed)
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatal("the target waits for as long as bytes come")
	})
	t.Run("one byte after each ping", func(t *testing.T) {
		s := start(t, limits(target.Limits{PDUTimeout: time.Second,
			NOPInterval: 300 * time.Millisecond}))
		sess := s.login(t, LoginOptions{})
		for _, b := range sess.Bytes(&pdu.NOPOut{Immediate: true, TaskTag: 1,
			TransferTag: pdu.ReservedTag}, nil)[:20] {
			if err := sess.SendRaw([]byte{b}); err != nil {
				require.ErrorIs(t, err, ErrClosed)
				return
			}
			time.Sleep(600 * time.Millisecond)
		}
		t.Fatal("a ping restarts the time limit of a PDU")
	})
	t.Run("silence between PDUs is allowed", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		require.NoError(t, sess.ExpectNothing(time.Second))
		sess.MustGood(t, TestUnitReady(1))
	})
	s.works(t)
}

// TestNOPInOpensTheWindow checks that a NOP-In opens a closed command window when its commands are
// aborted. Aborted commands have no answer that could do so, and an initiator with nothing else in
// flight would wait for the next ping.
func TestNOPInOpensTheWindow(t *testing.T) {
	const width = 4
	s := start(t, limits(target.Limits{CommandWindow: width}))
	told := func(t *testing.T, sess *Session) {
		t.Helper()
		in, _ := testtool.Must2(Expect[pdu.NOPIn](sess.Conn))(t)
		require.Equal(t, []uint32{pdu.ReservedTag, pdu.ReservedTag},
			[]uint32{in.TaskTag, in.TransferTag}, "it asks for no answer")
		require.False(t, pdu.SNLess(sess.MaxCmdSN, sess.CmdSN), "the window is open")
		attentions(t, sess, 1)
		sess.MustGood(t, TestUnitReady(1))
	}
	t.Run("11.19/commands that hang in the disk", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		release, hangs := s.stall(t, disktest.OpRead)
		for range width {
			sess.Forget(sess.MustStart(t, Read10(1, 0, 1)))
		}
		hangs(width)
		manageAll(t, sess, pdu.TMComplete, pdu.TMLogicalUnitReset)
		require.Equal(t, sess.ExpCmdSN-1, sess.MaxCmdSN, "the disk is still at work")
		require.NoError(t, sess.ExpectOnlyPing())
		release()
		told(t, sess)
	})
	t.Run("11.19/commands that another initiator aborts", func(t *testing.T) {
		sess, neighbour := s.login(t, solicited), s.login(t, other)
		for range width {
			task, _ := waiting(t, sess, 1, 0, pattern(8*BlockSize, 1))
			sess.Forget(task)
		}
		require.Equal(t, sess.ExpCmdSN-1, sess.MaxCmdSN)
		manageAll(t, neighbour, pdu.TMComplete, pdu.TMClearTaskSet)
		told(t, sess)
	})
	s.works(t)
}
