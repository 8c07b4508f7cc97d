package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// TestMalformedPDUs sends PDUs that the standard forbids. Each ends its own session and no other
// one.
func TestMalformedPDUs(t *testing.T) {
	s := start(t)
	bystander := s.login(t, other)
	ping := func(sess *Session) Message {
		return &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag,
			CmdSN: sess.CmdSN}
	}
	header := func(i int, v byte) Option { return WithHeader(func(h *pdu.Header) { h[i] = v }) }
	for _, tt := range []struct {
		name string
		msg  func(sess *Session) Message
		data int
		opts []Option
	}{
		{"11.2.2.2/additional header beyond its room", nil, 0,
			[]Option{WithAHS([]byte{0xff, 0xff, 1, 0})}},
		{"11.2.1.8/reserved task tag", nil, 0,
			[]Option{WithHeader(func(h *pdu.Header) { copy(h[16:], "\xff\xff\xff\xff") })}},
		{"11.18/NOP-Out without F", ping, 0, []Option{header(1, 0)}},
		{"11.5/task management without F", func(sess *Session) Message {
			return &pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMLogicalUnitReset,
				LUN: LUN(1), TaskTag: 1, CmdSN: sess.CmdSN}
		}, 0, []Option{header(1, 5)}},
		{"11.14.2/logout with data", func(sess *Session) Message {
			return &pdu.LogoutRequest{Immediate: true, TaskTag: 1, CmdSN: sess.CmdSN}
		}, 8, nil},
		{"11.10.2/text with F and C", func(sess *Session) Message {
			return &pdu.TextRequest{Final: true, Continue: true, TaskTag: 1,
				TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN}
		}, 8, nil},
		{"13.12/data segment over the target's limit", ping, 1 << 19, nil},
		{"11.2.1.6/a data segment of 16 MiB announced", ping, 4,
			[]Option{WithHeader(func(h *pdu.Header) { h.SetDataLen(pdu.MaxDataLen) })}},
		{"11.2.1.2/unassigned opcode",
			func(*Session) Message { return rawMessage{0: 0x07, 1: 0x80} }, 0, nil},
		{"11.2.1.2/opcode of a target", func(*Session) Message {
			return &pdu.SCSIResponse{TaskTag: 1}
		}, 0, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			msg := Message(numbered(sess, sess.CmdSN, false))
			if tt.msg != nil {
				msg = tt.msg(sess)
			}
			// The target may close before all data is sent.
			if err := sess.Send(msg, make([]byte, tt.data), tt.opts...); err != nil {
				require.ErrorIs(t, err, ErrClosed)
			}
			list := testtool.Must(sess.ExpectClosedAfter())(t)
			require.LessOrEqual(t, len(list), 1)
			for _, p := range list {
				require.Equal(t, pdu.OpReject, p.Header.Opcode())
			}
			bystander.MustGood(t, TestUnitReady(1))
		})
	}
	require.Zero(t, s.seen.count("panic"))
	require.Empty(t, attentions(t, bystander, 1))
	s.works(t)
}

// TestTolerated sends PDUs that are odd but allowed, or forbidden but harmless.
func TestTolerated(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	with := func(c Command, opts ...Option) Command { c.Options = opts; return c }
	t.Run("11.2.2/as many additional headers as there can be", func(t *testing.T) {
		var b []byte
		for len(b) < 1020 {
			b = append(b, 0, 1, 9, 0)
		}
		sess.MustGood(t, with(TestUnitReady(1), WithAHS(b)))
	})
	t.Run("11.2.2.3/an unsupported CDB of 32 bytes", func(t *testing.T) {
		sess.MustFail(t, Command{LUN: 1,
			CDB: append([]byte{0x7f, 0, 0, 0, 0, 0, 0, 24, 0xff, 0xff}, make([]byte, 22)...)},
			"05/20/00")
	})
	t.Run("11.2.1/reserved bits", func(t *testing.T) {
		sess.MustGood(t, with(TestUnitReady(1), WithHeader(func(h *pdu.Header) {
			h[0] |= 0x80
			h[2], h[3] = 0xff, 0xff
		})))
	})
	t.Run("11.3.1/every task attribute", func(t *testing.T) {
		for attr := range pdu.TaskAttr(8) {
			c := TestUnitReady(1)
			c.Edit = func(cmd *pdu.SCSICommand) { cmd.Attr = attr }
			r, err := sess.Do(c)
			if _, rejected := ReasonOf(err); rejected {
				require.Greater(t, attr, pdu.TaskAttrHeadOfQueue)
				sess.CmdSN = sess.ExpCmdSN
				continue
			}
			require.NoError(t, err)
			if attr <= pdu.TaskAttrHeadOfQueue {
				require.True(t, r.Good(), "%v: %s", attr, r.Failed())
			}
		}
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.16/SNACK is rejected at error recovery level 0", func(t *testing.T) {
		require.NoError(t, sess.Send(snack(4711), nil))
		r := testtool.Must(sess.AwaitReject(4711))(t)
		require.Contains(t, []pdu.RejectReason{pdu.RejectSNACK, pdu.RejectProtocolError}, r.Reason)
		sess.MustGood(t, TestUnitReady(1))
	})
	s.works(t)
}

// TestRejectOfHeldPDU checks that the Reject of a PDU that arrived ahead of its turn has that PDU's
// header.
func TestRejectOfHeldPDU(t *testing.T) {
	s := start(t)
	sess := s.login(t, solicited)
	task, r2t := waiting(t, sess, 1, 0, pattern(BlockSize, 1))
	early, late := numbered(sess, sess.CmdSN, false), numbered(sess, sess.CmdSN+1, false)
	late.TaskTag = task.Tag() // in use
	sess.CmdSN += 2
	require.NoError(t, sess.Send(late, nil))
	require.NoError(t, sess.Send(early, nil))
	done(t, sess, early)
	r := testtool.Must(sess.AwaitReject(task.Tag()))(t)
	require.Equal(t, pdu.RejectTaskInProgress, r.Reason)
	require.Equal(t, pdu.OpSCSICommand, r.Header.Opcode())
	require.NoError(t, task.Answer(r2t))
	require.True(t, task.MustFinish(t).Good())
	sess.MustGood(t, TestUnitReady(1))
}
