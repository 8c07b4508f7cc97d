package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// rejects send numbered requests that the target rejects, each with the next CmdSN.
var rejects = map[string]func(t *testing.T, sess *Session, tag uint32){
	"Text Request with a wrong digest": func(t *testing.T, sess *Session, tag uint32) {
		require.NoError(t, sess.Send(&pdu.TextRequest{Final: true, TaskTag: tag,
			TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN,
			ExpStatSN: sess.ExpStatSN}, KV("SendTargets", "").Text(), WrongDataDigest()))
	},
	"Text Request with an unknown transfer tag": func(t *testing.T, sess *Session, tag uint32) {
		require.NoError(t, sess.Send(&pdu.TextRequest{Final: true, TaskTag: tag, TransferTag: 77,
			CmdSN: sess.CmdSN, ExpStatSN: sess.ExpStatSN}, nil))
	},
	"Text Request with a key that comes twice": func(t *testing.T, sess *Session, tag uint32) {
		require.NoError(t, sess.Send(&pdu.TextRequest{Final: true, TaskTag: tag,
			TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN,
			ExpStatSN: sess.ExpStatSN}, KV("SendTargets", "", "SendTargets", "").Text()))
	},
	"NOP-Out with a wrong digest": func(t *testing.T, sess *Session, tag uint32) {
		require.NoError(t, sess.Send(&pdu.NOPOut{TaskTag: tag, TransferTag: pdu.ReservedTag,
			CmdSN: sess.CmdSN, ExpStatSN: sess.ExpStatSN}, []byte("hello"), WrongDataDigest()))
	},
	"NOP-Out with both tags": func(t *testing.T, sess *Session, tag uint32) {
		require.NoError(t, sess.Send(&pdu.NOPOut{TaskTag: tag, TransferTag: 77, CmdSN: sess.CmdSN,
			ExpStatSN: sess.ExpStatSN}, nil))
	},
	"Logout Request for no known reason": func(t *testing.T, sess *Session, tag uint32) {
		require.NoError(t, sess.Send(&pdu.LogoutRequest{Reason: 0x55, TaskTag: tag, CID: sess.CID,
			CmdSN: sess.CmdSN, ExpStatSN: sess.ExpStatSN}, nil))
	},
}

// TestRejectedCmdSN checks RFC 7143 7.3: the number of a rejected request does not count as
// received, and the initiator may use it again. An initiator that goes on without it, like Linux
// and libiscsi, is not delayed.
func TestRejectedCmdSN(t *testing.T) {
	s := start(t)
	for name, send := range rejects {
		begin := func(t *testing.T) (sess *Session, rejected, tag uint32) {
			sess = s.login(t, bothDigests)
			tag = sess.NewTag()
			send(t, sess, tag)
			require.NoError(t, testtool.Err(sess.AwaitReject(tag)))
			require.Equal(t, sess.CmdSN, sess.ExpCmdSN, "it does not count as received")
			sess.CmdSN++
			return sess, sess.CmdSN - 1, tag
		}
		t.Run("7.3/"+name+"/another request takes its number", func(t *testing.T) {
			sess, rejected, _ := begin(t)
			again, after := numbered(sess, rejected, false), numbered(sess, rejected+1, false)
			require.NoError(t, sess.Send(again, nil))
			done(t, sess, again)
			require.NoError(t, sess.Send(after, nil))
			require.Equal(t, rejected+2, done(t, sess, after).ExpCmdSN)
			require.NoError(t, sess.Send(again, nil))
			require.NoError(t, sess.ExpectOnlyPing(), "once")
		})
		t.Run("7.3/"+name+"/the initiator goes on without it", func(t *testing.T) {
			sess, rejected, _ := begin(t)
			sess.MustGood(t, TestUnitReady(1))
			require.Equal(t, rejected+2, sess.ExpCmdSN)
			// sent after the Reject, behind requests that were under way
			late := numbered(sess, rejected, false)
			require.NoError(t, sess.Send(late, nil))
			done(t, sess, late)
			require.NoError(t, sess.Send(late, nil))
			require.NoError(t, sess.ExpectOnlyPing(), "once")
			sess.MustGood(t, TestUnitReady(1))
		})
		t.Run("7.11/"+name+"/the number is aborted", func(t *testing.T) {
			sess, rejected, tag := begin(t)
			abortTask(t, sess, pdu.TMComplete, 1, tag, rejected)
			require.NoError(t, sess.Send(numbered(sess, rejected, false), nil))
			require.NoError(t, sess.ExpectOnlyPing())
			sess.MustGood(t, TestUnitReady(1))
		})
		t.Run("7.11/"+name+"/the number is aborted later", func(t *testing.T) {
			sess, rejected, tag := begin(t)
			sess.MustGood(t, TestUnitReady(1))
			abortTask(t, sess, pdu.TMComplete, 1, tag, rejected)
			require.NoError(t, sess.Send(numbered(sess, rejected, false), nil))
			require.NoError(t, sess.ExpectOnlyPing())
		})
		t.Run("4.2.3.3/"+name+"/a reset does not wait for it", func(t *testing.T) {
			sess, _, _ := begin(t)
			manageAll(t, sess, pdu.TMComplete, pdu.TMLogicalUnitReset)
			attentions(t, sess, 1)
			sess.MustGood(t, TestUnitReady(1))
		})
	}
	t.Run("7.3/a request ahead of its turn", func(t *testing.T) {
		sess := s.login(t, bothDigests)
		first, last, tag := numbered(sess, sess.CmdSN, false), numbered(sess, sess.CmdSN+2, false),
			sess.NewTag()
		sess.CmdSN++
		rejects["NOP-Out with a wrong digest"](t, sess, tag)
		require.NoError(t, testtool.Err(sess.AwaitReject(tag)))
		require.NoError(t, sess.Send(last, nil))
		require.NoError(t, sess.Send(first, nil))
		done(t, sess, first)
		done(t, sess, last)
	})
	t.Run("7.3/a SCSI Command in a discovery session", func(t *testing.T) {
		sess := testtool.Must(Login(s.addr, LoginOptions{Discovery: true}))(t)
		defer sess.Close()
		command := numbered(sess, sess.CmdSN, false)
		require.NoError(t, sess.Send(command, nil))
		require.NoError(t, testtool.Err(sess.AwaitReject(command.TaskTag)))
		require.Equal(t, command.CmdSN, sess.ExpCmdSN)
		require.NoError(t, testtool.Err(sess.Text(KV("SendTargets", "All"))))
		command.CmdSN = sess.CmdSN
		require.NoError(t, sess.Send(command, nil))
		require.NoError(t, testtool.Err(sess.AwaitReject(command.TaskTag)))
		sess.CmdSN++
		require.NoError(t, testtool.Err(sess.Text(KV("SendTargets", "All"))))
	})
	s.works(t)
}

// TestManyRejects checks that many Rejects do not close the command window, even if it is for a
// single command.
func TestManyRejects(t *testing.T) {
	for _, width := range []uint32{1, 4} {
		s := start(t, limits(target.Limits{CommandWindow: int(width)}))
		sess := s.login(t, bothDigests)
		for range 5 * width {
			tag := sess.NewTag()
			rejects["Text Request with a wrong digest"](t, sess, tag)
			require.NoError(t, testtool.Err(sess.AwaitReject(tag)))
			sess.CmdSN++
			require.Equal(t, sess.CmdSN+width-1, sess.MaxCmdSN)
		}
		sess.MustGood(t, TestUnitReady(1))
		require.Equal(t, sess.CmdSN+width-1, sess.MaxCmdSN)
	}
}
