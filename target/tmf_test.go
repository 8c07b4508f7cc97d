package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// other is a second initiator.
var other = LoginOptions{Initiator: DefaultInitiator + ".other", ISID: [6]byte{0x80, 2}}

// manage runs a task management function and checks the response.
func manage(t *testing.T, sess *Session, want pdu.TMResponse, r pdu.TaskManagementRequest) {
	t.Helper()
	r.Immediate = true
	require.Equal(t, want, testtool.Must(sess.TaskManagement(r))(t))
}

// manageAll runs a function that covers the tasks of LUN 1 and checks the response.
func manageAll(t *testing.T, sess *Session, want pdu.TMResponse, f pdu.TMFunction) {
	t.Helper()
	manage(t, sess, want, pdu.TaskManagementRequest{Function: f, LUN: LUN(1)})
}

// abortTask asks for the end of one task, and checks the response.
func abortTask(t *testing.T, sess *Session, want pdu.TMResponse, lun uint16, tag, refCmdSN uint32) {
	t.Helper()
	manage(t, sess, want, pdu.TaskManagementRequest{Function: pdu.TMAbortTask, LUN: LUN(lun),
		RefTaskTag: tag, RefCmdSN: refCmdSN})
}

// aborts ends a task that is under way.
func aborts(t *testing.T, sess *Session, task *Task) {
	t.Helper()
	require.Equal(t, pdu.TMComplete, testtool.Must(sess.AbortTask(task))(t))
}

// waiting starts a write and does not answer its R2T.
func waiting(t *testing.T, sess *Session, lun uint16, lba uint32, data []byte) (*Task, pdu.R2T) {
	t.Helper()
	c := Write10(lun, lba, data)
	c.OnR2T = HoldR2T
	task := sess.MustStart(t, c)
	return task, testtool.Must(task.AwaitR2T())(t)
}

// quiet checks that nothing more comes for an aborted task, even if data is still sent for it.
func quiet(t *testing.T, sess *Session, task *Task, r2t pdu.R2T) {
	t.Helper()
	sess.Forget(task)
	require.NoError(t, task.Answer(r2t))
	require.NoError(t, sess.ExpectOnlyPing())
}

// attentions returns the unit attentions of a LUN for a session, as "key/asc/ascq".
func attentions(t *testing.T, sess *Session, lun uint16) []string {
	t.Helper()
	list := testtool.Must(sess.ClearAttention(lun))(t)
	var names []string
	for _, s := range list {
		names = append(names, s.String())
	}
	return names
}

func TestAbortTask(t *testing.T) {
	s := start(t)
	old, data := pattern(8*BlockSize, 1), pattern(8*BlockSize, 2)
	t.Run("11.6.1/a task that waits for data", func(t *testing.T) {
		sess := s.login(t, solicited)
		sess.MustGood(t, Write10(1, 0, old))
		task, r2t := waiting(t, sess, 1, 0, data)
		aborts(t, sess, task)
		quiet(t, sess, task, r2t)
		require.Equal(t, old, sess.MustGood(t, Read10(1, 0, 8)).Data)
		require.Empty(t, attentions(t, sess, 1), "no unit attention for the initiator that aborts")
	})
	t.Run("11.6.1/a task with a part of its data", func(t *testing.T) {
		sess := s.login(t, solicited)
		task, r2t := waiting(t, sess, 1, 0, data)
		require.NoError(t, task.DataOut(pdu.DataOut{TransferTag: r2t.TransferTag}, data[:512]))
		aborts(t, sess, task)
		require.NoError(t, task.DataOut(pdu.DataOut{Final: true, TransferTag: r2t.TransferTag,
			DataSN: 1, BufferOffset: 512}, data[512:]))
		require.NoError(t, sess.ExpectOnlyPing())
		require.Equal(t, old, sess.MustGood(t, Read10(1, 0, 8)).Data)
	})
	for _, tt := range []struct {
		name    string
		op      disktest.Op
		command Command
	}{
		{"read", disktest.OpRead, Read10(1, 0, 8)},
		{"write", disktest.OpWrite, Write10(1, 0, data)},
	} {
		t.Run("11.6.1/a "+tt.name+" that hangs in the disk", func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			release, hangs := s.stall(t, tt.op)
			task := sess.MustStart(t, tt.command)
			hangs(1)
			aborts(t, sess, task)
			require.NoError(t, sess.ExpectOnlyPing())
			release()
			// The next write to the same blocks comes after the rest of the aborted one, which has
			// no answer.
			sess.MustGood(t, Write10(1, 0, old))
			require.Equal(t, old, sess.MustGood(t, Read10(1, 0, 8)).Data)
			require.NoError(t, sess.ExpectOnlyPing())
			require.Equal(t, old, sess.MustGood(t, Read10(1, 0, 8)).Data)
		})
	}
	t.Run("11.6.1/a task tag can be used again at once", func(t *testing.T) {
		sess := s.login(t, solicited)
		task, _ := waiting(t, sess, 1, 0, data)
		require.NoError(t, testtool.Err(sess.AbortTask(task)))
		cmd := numbered(sess, sess.CmdSN, false)
		cmd.TaskTag = task.Tag()
		require.NoError(t, sess.Send(cmd, nil))
		done(t, sess, cmd)
	})
	t.Run("11.5.1/an immediate task", func(t *testing.T) {
		sess := s.login(t, solicited)
		c := Write10(1, 0, data)
		c.OnR2T, c.Immediate = HoldR2T, true
		task := sess.MustStart(t, c)
		r2t := testtool.Must(task.AwaitR2T())(t)
		abortTask(t, sess, pdu.TMComplete, 1, task.Tag(), sess.CmdSN)
		quiet(t, sess, task, r2t)
	})
	t.Run("11.6.1/a task that has ended", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		task := sess.MustStart(t, TestUnitReady(1))
		require.True(t, task.MustFinish(t).Good())
		require.Equal(t, pdu.TMTaskNotExist, testtool.Must(sess.AbortTask(task))(t))
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.6.1/a task that never was, outside the window", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		abortTask(t, sess, pdu.TMTaskNotExist, 1, 4711, sess.CmdSN-1)
		abortTask(t, sess, pdu.TMTaskNotExist, 1, 4711, sess.MaxCmdSN+1)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.6.1/a task that has not arrived counts as received", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		lost := sess.CmdSN // its command never arrives
		sess.CmdSN++
		abortTask(t, sess, pdu.TMComplete, 1, 4711, lost)
		sess.MustGood(t, TestUnitReady(1)) // and does not delay those after it
		require.NoError(t, sess.Send(numbered(sess, lost, false), nil))
		require.NoError(t, sess.ExpectOnlyPing(), "it does not run when it arrives late")
	})
	t.Run("11.6.1/a task that waits for its turn", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		early, late := numbered(sess, sess.CmdSN, false), numbered(sess, sess.CmdSN+1, false)
		sess.CmdSN += 2
		require.NoError(t, sess.Send(late, nil))
		abortTask(t, sess, pdu.TMComplete, 1, late.TaskTag, late.CmdSN)
		require.NoError(t, sess.Send(early, nil))
		done(t, sess, early)
		require.NoError(t, sess.ExpectOnlyPing())
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.5.3/a LUN that does not exist", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		abortTask(t, sess, pdu.TMLUNNotExist, 77, 1, sess.CmdSN-1)
	})
	t.Run("11.5.1/a task of another session cannot be aborted", func(t *testing.T) {
		sess, thief := s.login(t, solicited), s.login(t, other)
		task, r2t := waiting(t, sess, 1, 0, data)
		abortTask(t, thief, pdu.TMTaskNotExist, 1, task.Tag(), thief.CmdSN-1)
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good())
	})
	s.works(t)
}

func TestAbortManyTasks(t *testing.T) {
	s := start(t)
	data := pattern(8*BlockSize, 2)
	for _, tt := range []struct {
		name     string
		function pdu.TMFunction
		lun2     bool   // tasks of LUN 2 end too
		others   bool   // tasks of the other session end too
		telling  string // unit attention of the other session on LUN 1
	}{
		{"11.5.1/ABORT TASK SET", pdu.TMAbortTaskSet, false, false, ""},
		{"11.5.1/CLEAR TASK SET", pdu.TMClearTaskSet, false, true, "06/2F/00"},
		{"11.5.1/LOGICAL UNIT RESET", pdu.TMLogicalUnitReset, false, true, "06/29/03"},
		{"11.5.1/TARGET WARM RESET", pdu.TMTargetWarmReset, true, true, "06/29/03"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess, neighbour := s.login(t, solicited),
				s.login(t, LoginOptions{Initiator: other.Initiator, ISID: other.ISID,
					Keys: solicited.Keys})
			one, oneR2T := waiting(t, sess, 1, 0, data)
			two, twoR2T := waiting(t, sess, 2, 0, data)
			theirs, theirR2T := waiting(t, neighbour, 1, 100, data)

			tag := testtool.Must(sess.SendTaskManagement(pdu.TaskManagementRequest{Immediate: true,
				Function: tt.function, LUN: LUN(1)}))(t)
			sess.Forget(one)
			require.NoError(t, testtool.Err(sess.Ping(nil))) // now the target has the request
			// A target may wait for the data that it has asked for before it acts (11.5.1).
			require.NoError(t, one.Answer(oneR2T))
			if tt.others {
				quiet(t, neighbour, theirs, theirR2T)
			}
			require.Equal(t, pdu.TMComplete, testtool.Must(sess.AwaitTaskManagement(tag))(t))
			require.NoError(t, sess.ExpectOnlyPing(), "no answer for a covered task")
			if tt.lun2 {
				quiet(t, sess, two, twoR2T)
			} else {
				require.NoError(t, two.Answer(twoR2T))
				require.True(t, two.MustFinish(t).Good())
			}
			if tt.others {
				require.NoError(t, neighbour.ExpectOnlyPing())
			} else {
				require.NoError(t, theirs.Answer(theirR2T))
				require.True(t, theirs.MustFinish(t).Good())
			}
			told := attentions(t, neighbour, 1)
			if tt.telling == "" {
				require.Empty(t, told)
			} else {
				require.NotEmpty(t, told, "the other initiator must learn of it")
				require.Equal(t, tt.telling[:5], told[0][:5])
			}
			if tt.lun2 {
				require.NotEmpty(t, attentions(t, neighbour, 2))
			} else {
				require.Empty(t, attentions(t, neighbour, 2))
			}
			attentions(t, sess, 1)
			attentions(t, sess, 2)
			sess.MustGood(t, Write10(1, 0, data))
			neighbour.MustGood(t, Write10(1, 0, data))
		})
	}
	t.Run("11.5.1/tasks that hang in the disk are covered, too", func(t *testing.T) {
		for _, function := range []pdu.TMFunction{pdu.TMAbortTaskSet, pdu.TMLogicalUnitReset} {
			sess := s.login(t, LoginOptions{})
			release, hangs := s.stall(t, disktest.OpRead)
			var tasks []*Task
			for range 5 {
				tasks = append(tasks, sess.MustStart(t, Read10(1, 0, 8)))
			}
			hangs(5)
			manageAll(t, sess, pdu.TMComplete, function)
			for _, task := range tasks {
				sess.Forget(task)
			}
			release()
			attentions(t, sess, 1)
			require.NoError(t, sess.ExpectOnlyPing())
			sess.MustGood(t, Read10(1, 0, 8))
			require.NoError(t, sess.ExpectOnlyPing())
		}
	})
	t.Run("11.5.3/a LUN that does not exist", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		for _, function := range []pdu.TMFunction{pdu.TMAbortTaskSet, pdu.TMClearTaskSet,
			pdu.TMLogicalUnitReset} {
			manage(t, sess, pdu.TMLUNNotExist,
				pdu.TaskManagementRequest{Function: function, LUN: LUN(77)})
		}
	})
	t.Run("SAM-5 7.4/CLEAR TASK SET makes no unit attention for initiators without tasks",
		func(t *testing.T) {
			sess, neighbour := s.login(t, LoginOptions{}), s.login(t, other)
			manageAll(t, sess, pdu.TMComplete, pdu.TMClearTaskSet)
			require.Empty(t, attentions(t, neighbour, 1))
		})
	t.Run("11.5.1/TARGET COLD RESET ends every session", func(t *testing.T) {
		sess, neighbour := s.login(t, LoginOptions{}), s.login(t, other)
		_, err := sess.SendTaskManagement(pdu.TaskManagementRequest{Immediate: true,
			Function: pdu.TMTargetColdReset})
		require.NoError(t, err)
		_, err = sess.ExpectClosedAfter() // the response may or may not arrive
		require.NoError(t, err)
		require.NoError(t, neighbour.ExpectClosed())
		fresh := MustLogin(t, s.addr, other)
		require.NotEmpty(t, attentions(t, fresh, 1))
		s.works(t)
	})
}

func TestTaskManagementRequests(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	t.Run("11.5.1/unsupported functions are not acknowledged", func(t *testing.T) {
		manageAll(t, sess, pdu.TMNotSupported, pdu.TMClearACA)
		manage(t, sess, pdu.TMReassignNotSupported,
			pdu.TaskManagementRequest{Function: pdu.TMTaskReassign, LUN: LUN(1), RefTaskTag: 5})
		for _, function := range []pdu.TMFunction{0, 13, 0x7f, pdu.TMQueryTask, pdu.TMQueryTaskSet,
			pdu.TMITNexusReset, pdu.TMQueryAsyncEvent} {
			manage(t, sess, pdu.TMNotSupported,
				pdu.TaskManagementRequest{Function: function, LUN: LUN(1), RefTaskTag: 5})
		}
	})
	t.Run("11.5/a function that is not immediate uses a number and comes in turn",
		func(t *testing.T) {
			r, err := sess.TaskManagement(pdu.TaskManagementRequest{Function: pdu.TMAbortTaskSet,
				LUN: LUN(1)})
			require.NoError(t, err)
			require.Equal(t, pdu.TMComplete, r)
			require.Equal(t, sess.CmdSN, sess.ExpCmdSN)
		})
	t.Run("11.5.1/ABORT TASK of itself", func(t *testing.T) {
		tag := sess.NewTag()
		require.NoError(t, sess.Send(&pdu.TaskManagementRequest{Immediate: true,
			Function: pdu.TMAbortTask, LUN: LUN(1), TaskTag: tag,
			RefTaskTag: tag, CmdSN: sess.CmdSN, RefCmdSN: sess.CmdSN}, nil))
		r := testtool.Must(sess.AwaitTaskManagement(tag))(t)
		require.Contains(t, []pdu.TMResponse{pdu.TMRejected, pdu.TMTaskNotExist}, r)
		sess.MustGood(t, TestUnitReady(1))
	})
	s.works(t)
}

// TestManagementWaitsForCommands checks RFC 7143 4.2.3.3: a function that covers many tasks acts on
// all commands with lower numbers, also on those that have not arrived or wait for their turn. None
// of them is answered after the function.
func TestManagementWaitsForCommands(t *testing.T) {
	s := start(t)
	ahead := func(t *testing.T) (sess *Session, first *pdu.SCSICommand, second pdu.SCSICommand) {
		sess = s.login(t, solicited)
		first = numbered(sess, sess.CmdSN, false)
		sess.CmdSN++
		second, _, _ = sess.Prepare(Write10(1, 0, pattern(8*BlockSize, 7)))
		require.NoError(t, sess.Send(&second, nil))
		return sess, first, second
	}
	for name, function := range map[string]pdu.TMFunction{"ABORT TASK SET": pdu.TMAbortTaskSet,
		"CLEAR TASK SET":     pdu.TMClearTaskSet,
		"LOGICAL UNIT RESET": pdu.TMLogicalUnitReset} {
		t.Run("4.2.3.3/"+name, func(t *testing.T) {
			sess, first, second := ahead(t)
			tag := testtool.Must(sess.SendTaskManagement(pdu.TaskManagementRequest{Immediate: true,
				Function: function, LUN: LUN(1)}))(t)
			require.NoError(t, sess.ExpectOnlyPing(), "it waits")
			abortTask(t, sess, pdu.TMRejected, 1, tag, sess.CmdSN)
			require.NoError(t, sess.Send(first, nil))
			done(t, sess, first)
			r2t, _ := testtool.Must2(Expect[pdu.R2T](sess.Conn))(t)
			require.Equal(t, second.TaskTag, r2t.TaskTag)
			require.Equal(t, pdu.TMComplete, testtool.Must(sess.AwaitTaskManagement(tag))(t))
			require.NoError(t,
				sess.Send(&pdu.DataOut{Final: true, LUN: LUN(1), TaskTag: second.TaskTag,
					TransferTag: r2t.TransferTag}, make([]byte, r2t.DesiredLength)))
			require.NoError(t, sess.ExpectOnlyPing(), "no answer for a covered task")
			attentions(t, sess, 1)
			sess.MustGood(t, TestUnitReady(1))
		})
	}
	t.Run("4.2.3.3/TARGET WARM RESET waits for nothing", func(t *testing.T) {
		sess, first, _ := ahead(t)
		manage(t, sess, pdu.TMComplete, pdu.TaskManagementRequest{Function: pdu.TMTargetWarmReset})
		require.Equal(t, sess.CmdSN, sess.ExpCmdSN, "covered commands count as received")
		require.NoError(t, sess.Send(first, nil))
		require.NoError(t, sess.ExpectOnlyPing())
		attentions(t, sess, 1)
		attentions(t, sess, 2)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("4.2.2.1/a number that no command can have", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		next := sess.CmdSN
		sess.CmdSN = sess.MaxCmdSN + 2
		manageAll(t, sess, pdu.TMComplete, pdu.TMAbortTaskSet)
		sess.CmdSN = next
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("4.2.2.1/too many of them are rejected", func(t *testing.T) {
		sess, first, _ := ahead(t)
		var tags []uint32
		rejected := 0
		for range 20 {
			tag := testtool.Must(sess.SendTaskManagement(pdu.TaskManagementRequest{Immediate: true,
				Function: pdu.TMAbortTaskSet, LUN: LUN(1)}))(t)
			tags = append(tags, tag)
		}
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		for _, p := range sess.Inbox() {
			require.Equal(t, pdu.RejectImmediate, pdu.RejectReason(p.Header[2]))
			rejected++
		}
		require.Positive(t, rejected)
		require.Less(t, rejected, len(tags))
		require.NoError(t, sess.Send(first, nil))
		for _, tag := range tags[:len(tags)-rejected] {
			require.Equal(t, pdu.TMComplete, testtool.Must(sess.AwaitTaskManagement(tag))(t))
		}
	})
	t.Run("11.6.1/ABORT TASK of a command of another LUN that waits for its turn",
		func(t *testing.T) {
			sess, first, second := ahead(t)
			abortTask(t, sess, pdu.TMTaskNotExist, 2, second.TaskTag, second.CmdSN)
			require.NoError(t, sess.Send(first, nil))
			done(t, sess, first)
			r2t, _ := testtool.Must2(Expect[pdu.R2T](sess.Conn))(t)
			require.Equal(t, second.TaskTag, r2t.TaskTag)
		})
	s.works(t)
}

// TestTaskManagementOfAnotherAddress checks that a function covers commands that address the same
// LUN in another way.
func TestTaskManagementOfAnotherAddress(t *testing.T) {
	const flat = 0x4001 << 48
	for name, function := range map[string]pdu.TMFunction{
		"SAM-5 7.2/ABORT TASK": pdu.TMAbortTask, "SAM-5 7.3/ABORT TASK SET": pdu.TMAbortTaskSet,
		"SAM-5 7.4/CLEAR TASK SET":     pdu.TMClearTaskSet,
		"SAM-5 7.7/LOGICAL UNIT RESET": pdu.TMLogicalUnitReset,
	} {
		t.Run(name, func(t *testing.T) {
			sess := start(t).login(t, solicited)
			one, oneR2T := waiting(t, sess, 1, 0, pattern(8*BlockSize, 1))
			elsewhere, elsewhereR2T := waiting(t, sess, 2, 0, pattern(8*BlockSize, 1))
			manage(t, sess, pdu.TMComplete,
				pdu.TaskManagementRequest{Function: function, LUN: flat, RefTaskTag: one.Tag(),
					RefCmdSN: one.CmdSN()})
			quiet(t, sess, one, oneR2T)
			require.NoError(t, elsewhere.Answer(elsewhereR2T))
			require.True(t, elsewhere.MustFinish(t).Good(), "another LUN")
		})
	}
}
