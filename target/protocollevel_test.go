package target_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// extended negotiates the features of RFC 7144. Writes wait for their R2T.
var extended = LoginOptions{Keys: KV("InitialR2T", "Yes", "ImmediateData", "No",
	"iSCSIProtocolLevel", "2")}

// extendedOther does the same for the second initiator.
var extendedOther = LoginOptions{Initiator: other.Initiator, ISID: other.ISID, Keys: extended.Keys}

// newFunctions are the functions that RFC 7144 adds.
var newFunctions = []pdu.TMFunction{pdu.TMQueryTask, pdu.TMQueryTaskSet, pdu.TMITNexusReset,
	pdu.TMQueryAsyncEvent}

// ask is like manage, but returns the additional response information.
func ask(t *testing.T, sess *Session, want pdu.TMResponse, r pdu.TaskManagementRequest) [3]byte {
	t.Helper()
	r.Immediate = true
	tag := testtool.Must(sess.SendTaskManagement(r))(t)
	got := testtool.Must(sess.AwaitTaskManagementPDU(tag))(t)
	require.Equal(t, want, got.Response)
	return got.Additional
}

// askTask queries a command.
func askTask(t *testing.T, sess *Session, want pdu.TMResponse, task *Task) {
	t.Helper()
	manage(t, sess, want, pdu.TaskManagementRequest{Function: pdu.TMQueryTask,
		LUN: LUN(task.LUN()), RefTaskTag: task.Tag(), RefCmdSN: task.CmdSN()})
}

func TestProtocolLevel(t *testing.T) {
	s := start(t)
	at := func(level string) LoginOptions {
		o := LoginOptions{Keys: solicited.Keys}
		if level != "" {
			o.Keys = append(KV("iSCSIProtocolLevel", level), o.Keys...)
		}
		return o
	}
	supported := reads(1, 16, 0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0)
	for _, level := range []string{"", "0", "1"} {
		t.Run(fmt.Sprintf("RFC 7144 4.1/the new functions at level %q", level), func(t *testing.T) {
			sess := s.login(t, at(level))
			require.Equal(t, []byte{0xda, 0, 0, 0}, sess.MustGood(t, supported).Data)
			task, r2t := waiting(t, sess, 1, 0, pattern(8*BlockSize, 1))
			for _, function := range newFunctions {
				require.Zero(t,
					ask(t, sess, pdu.TMNotSupported,
						pdu.TaskManagementRequest{Function: function, LUN: LUN(1),
							RefTaskTag: task.Tag(), RefCmdSN: task.CmdSN()}))
			}
			require.NoError(t, task.Answer(r2t))
			require.True(t, task.MustFinish(t).Good())
		})
	}
	t.Run("SPC-4 6.36/the new functions are reported", func(t *testing.T) {
		require.Equal(t, []byte{0xde, 0x07, 0, 0}, s.login(t, extended).MustGood(t, supported).Data)
	})
	s.works(t)
}

func TestQueryTask(t *testing.T) {
	s := start(t)
	data := pattern(8*BlockSize, 2)
	request := func(function pdu.TMFunction, lun uint16, tag,
		refCmdSN uint32) pdu.TaskManagementRequest {
		return pdu.TaskManagementRequest{Function: function, LUN: LUN(lun), RefTaskTag: tag,
			RefCmdSN: refCmdSN}
	}
	t.Run("RFC 7144 6.4.2/a task that waits for data", func(t *testing.T) {
		sess := s.login(t, extended)
		task, r2t := waiting(t, sess, 1, 0, data)
		askTask(t, sess, pdu.TMSucceeded, task)
		require.NoError(t, task.Answer(r2t), "the query does not change the task")
		require.True(t, task.MustFinish(t).Good())
		askTask(t, sess, pdu.TMComplete, task)
	})
	t.Run("RFC 7144 6.4.2/a task that hangs in the disk", func(t *testing.T) {
		sess := s.login(t, extended)
		release, hangs := s.stall(t, disktest.OpRead)
		task := sess.MustStart(t, Read10(1, 0, 8))
		hangs(1)
		askTask(t, sess, pdu.TMSucceeded, task)
		release()
		require.Equal(t, data, task.MustFinish(t).Data)
	})
	t.Run("RFC 7144 6.3.3/an immediate task", func(t *testing.T) {
		sess := s.login(t, extended)
		c := Write10(1, 0, data)
		c.OnR2T, c.Immediate = HoldR2T, true
		task := sess.MustStart(t, c)
		r2t := testtool.Must(task.AwaitR2T())(t)
		askTask(t, sess, pdu.TMSucceeded, task)
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good())
	})
	t.Run("RFC 7144 6.4.2/a task that was aborted", func(t *testing.T) {
		sess := s.login(t, extended)
		task, _ := waiting(t, sess, 1, 0, data)
		require.NoError(t, testtool.Err(sess.AbortTask(task)))
		askTask(t, sess, pdu.TMComplete, task)
	})
	t.Run("RFC 7144 6.4.2/a task of another LUN or session", func(t *testing.T) {
		sess, neighbour := s.login(t, extended), s.login(t, extendedOther)
		task, r2t := waiting(t, sess, 1, 0, data)
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTask, 2, task.Tag(), task.CmdSN()))
		for neighbour.NewTag() <= task.Tag() {
			continue // the request has another tag than the task
		}
		ask(t, neighbour, pdu.TMComplete,
			request(pdu.TMQueryTask, 1, task.Tag(), neighbour.CmdSN-1))
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good())
	})
	t.Run("RFC 7144 6.4.2/a task that never was, outside the window", func(t *testing.T) {
		sess := s.login(t, extended)
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTask, 1, 4711, sess.CmdSN-1))
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTask, 1, 4711, sess.MaxCmdSN+1))
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("RFC 7144 6.3.3/a task that has not arrived counts as received", func(t *testing.T) {
		sess := s.login(t, extended)
		lost := sess.CmdSN
		sess.CmdSN++
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTask, 1, 4711, lost))
		sess.MustGood(t, TestUnitReady(1))
		require.NoError(t, sess.Send(numbered(sess, lost, false), nil))
		require.NoError(t, sess.ExpectOnlyPing(),
			"it does not run after a query has answered that it does not exist")
	})
	t.Run("RFC 7144 6.4.2/a task that waits for its turn", func(t *testing.T) {
		sess := s.login(t, extended)
		early, late := numbered(sess, sess.CmdSN, false), numbered(sess, sess.CmdSN+1, false)
		sess.CmdSN += 2
		require.NoError(t, sess.Send(late, nil))
		ask(t, sess, pdu.TMSucceeded, request(pdu.TMQueryTask, 1, late.TaskTag, late.CmdSN))
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTask, 2, late.TaskTag, late.CmdSN))
		ask(t, sess, pdu.TMSucceeded, request(pdu.TMQueryTaskSet, 1, 0, 0))
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTaskSet, 2, 0, 0))
		require.NoError(t, sess.Send(early, nil))
		// They begin in order, and may end in another one.
		var ended []uint32
		for range 2 {
			r, _ := testtool.Must2(Expect[pdu.SCSIResponse](sess.Conn))(t)
			require.Zero(t, r.Status)
			ended = append(ended, r.TaskTag)
		}
		require.ElementsMatch(t, []uint32{early.TaskTag, late.TaskTag}, ended)
	})
	t.Run("RFC 7144 6.3/a task management request", func(t *testing.T) {
		sess := s.login(t, extended)
		tag := sess.NewTag()
		require.NoError(t, sess.Send(&pdu.TaskManagementRequest{Immediate: true,
			Function: pdu.TMQueryTask, LUN: LUN(1), TaskTag: tag,
			RefTaskTag: tag, CmdSN: sess.CmdSN, RefCmdSN: sess.CmdSN}, nil))
		r := testtool.Must(sess.AwaitTaskManagement(tag))(t)
		require.Equal(t, pdu.TMRejected, r)
		// These are not commands: the function could end a command before its answer.
		early, late := &pdu.NOPOut{TaskTag: sess.NewTag(), TransferTag: pdu.ReservedTag,
			CmdSN: sess.CmdSN, ExpStatSN: sess.ExpStatSN}, sess.NewTag()
		require.NoError(t, sess.Send(&pdu.TaskManagementRequest{Function: pdu.TMAbortTaskSet,
			LUN: LUN(1), TaskTag: late,
			RefTaskTag: pdu.ReservedTag, CmdSN: sess.CmdSN + 1, ExpStatSN: sess.ExpStatSN}, nil))
		sess.CmdSN += 2
		ask(t, sess, pdu.TMRejected, request(pdu.TMQueryTask, 1, late, early.CmdSN+1))
		require.NoError(t, sess.Send(early, nil))
		require.NoError(t, testtool.Err(sess.AwaitPing(early.TaskTag)))
		r = testtool.Must(sess.AwaitTaskManagement(late))(t)
		require.Equal(t, pdu.TMComplete, r)
	})
	t.Run("RFC 7144 6.4.2/QUERY TASK SET", func(t *testing.T) {
		sess, neighbour := s.login(t, extended), s.login(t, extendedOther)
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTaskSet, 1, 0, 0))
		task, r2t := waiting(t, sess, 1, 0, data)
		require.Zero(t, ask(t, sess, pdu.TMSucceeded, request(pdu.TMQueryTaskSet, 1, 0, 0)))
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTaskSet, 2, 0, 0))
		ask(t, neighbour, pdu.TMComplete, request(pdu.TMQueryTaskSet, 1, 0, 0))
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good())
		ask(t, sess, pdu.TMComplete, request(pdu.TMQueryTaskSet, 1, 0, 0))
	})
	t.Run("RFC 7144 6.3.1/a LUN that does not exist", func(t *testing.T) {
		sess := s.login(t, extended)
		for _, function := range []pdu.TMFunction{pdu.TMQueryTask, pdu.TMQueryTaskSet,
			pdu.TMQueryAsyncEvent} {
			ask(t, sess, pdu.TMLUNNotExist, request(function, 77, 1, sess.CmdSN-1))
		}
	})
	s.works(t)
}

func TestQueryAsynchronousEvent(t *testing.T) {
	s := start(t)
	query := pdu.TaskManagementRequest{Function: pdu.TMQueryAsyncEvent, LUN: LUN(1)}
	reset := pdu.TaskManagementRequest{Function: pdu.TMLogicalUnitReset, LUN: LUN(1)}
	sess := s.login(t, extended)
	t.Run("RFC 7144 6.4.2/nothing is pending", func(t *testing.T) {
		require.Zero(t, ask(t, sess, pdu.TMComplete, query))
	})
	t.Run("RFC 7144 6.4.2/a unit attention condition", func(t *testing.T) {
		manage(t, sess, pdu.TMComplete, reset)
		for range 2 {
			require.Equal(t, [3]byte{0x16, 0x29, 0x03}, ask(t, sess, pdu.TMSucceeded, query),
				"one unit attention; the query does not clear it")
		}
		require.Zero(t, ask(t, sess, pdu.TMComplete,
			pdu.TaskManagementRequest{Function: pdu.TMQueryAsyncEvent, LUN: LUN(2)}))
		sess.MustFail(t, TestUnitReady(1), "06/29/03")
		require.Zero(t, ask(t, sess, pdu.TMComplete, query))
	})
	t.Run("RFC 7144 6.4.2/several", func(t *testing.T) {
		cleared := s.login(t, extendedOther)
		waiting(t, sess, 1, 0, pattern(8*BlockSize, 1))
		manageAll(t, cleared, pdu.TMComplete, pdu.TMClearTaskSet)
		manage(t, sess, pdu.TMComplete, reset)
		require.Equal(t, [3]byte{0x26, 0x29, 0x03}, ask(t, sess, pdu.TMSucceeded, query))
		sess.MustFail(t, TestUnitReady(1), "06/29/03")
		require.Equal(t, [3]byte{0x16, 0x2f, 0x00}, ask(t, sess, pdu.TMSucceeded, query))
		sess.MustFail(t, TestUnitReady(1), "06/2F/00")
	})
	t.Run("RFC 7144 6.3/only unit attentions of the asking session", func(t *testing.T) {
		third := extendedOther
		third.ISID[5] = 9
		fresh := MustLogin(t, s.addr, third)
		require.Equal(t, [3]byte{0x16, 0x29, 0x00}, ask(t, fresh, pdu.TMSucceeded, query))
		require.Zero(t, ask(t, sess, pdu.TMComplete, query))
	})
}

func TestNexusReset(t *testing.T) {
	data := pattern(8*BlockSize, 2)
	nexusReset := pdu.TaskManagementRequest{Function: pdu.TMITNexusReset}
	for _, immediate := range []bool{true, false} {
		t.Run(fmt.Sprintf("RFC 7144 6.3/I_T NEXUS RESET, immediate %t", immediate),
			func(t *testing.T) {
				s := start(t)
				old := pattern(8*BlockSize, 1)
				sess, neighbour := s.login(t, extended), s.login(t, extendedOther)
				sess.MustGood(t, Write10(1, 0, old))
				theirs, theirR2T := waiting(t, neighbour, 2, 0, data)
				sess.MustGood(t, Reserve6(1))
				neighbour.MustFail(t, TestUnitReady(1), reserved)
				task, _ := waiting(t, sess, 1, 0, data)
				resume, hangs := s.stall(t, disktest.OpRead)
				reading := sess.MustStart(t, Read10(1, 0, 8))
				hangs(1)
				sess.Forget(task)
				sess.Forget(reading)

				// the LUN field is reserved and ignored
				nexusReset.Immediate, nexusReset.LUN = immediate, LUN(77)
				tag := testtool.Must(sess.SendTaskManagement(nexusReset))(t)
				// Tasks, reservation and connection end while the disk still hangs. The response
				// comes last.
				require.Equal(t, pdu.TMComplete, testtool.Must(sess.AwaitTaskManagement(tag))(t))
				require.NoError(t, sess.ExpectClosed())
				resume()

				require.Empty(t, attentions(t, neighbour, 1), "others are not affected")
				neighbour.MustGood(t, TestUnitReady(1))
				require.NoError(t, theirs.Answer(theirR2T))
				require.True(t, theirs.MustFinish(t).Good())
				require.Equal(t, old, neighbour.MustGood(t, Read10(1, 0, 8)).Data)
				again := MustLogin(t, s.addr, extended)
				require.Equal(t, []string{"06/29/07"}, attentions(t, again, 1),
					"I_T NEXUS LOSS OCCURRED")
				require.NoError(t, again.ExpectOnlyPing())
			})
	}
}
