package target_test

import (
	"math/rand"
	"runtime"
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
	command := func(sess *Session) *pdu.SCSICommand { return numbered(sess, sess.CmdSN, false) }
	ahs := func(b ...byte) Option { return WithAHS(b) }
	header := func(i int, v byte) Option { return WithHeader(func(h *pdu.Header) { h[i] = v }) }
	for _, tt := range []struct {
		name string
		msg  func(sess *Session) Message
		data int
		opts []Option
	}{
		{"11.2.2.2/additional header beyond its room", nil, 0, []Option{ahs(0xff, 0xff, 1, 0)}},
		{"11.2.1.8/reserved task tag", nil, 0,
			[]Option{WithHeader(func(h *pdu.Header) { copy(h[16:], "\xff\xff\xff\xff") })}},
		{"11.2.1.5/additional header in a NOP-Out", func(sess *Session) Message {
			return &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag,
				CmdSN: sess.CmdSN}
		}, 0, []Option{ahs(0, 1, 9, 0)}},
		{"11.18/NOP-Out without F", func(sess *Session) Message {
			return &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag,
				CmdSN: sess.CmdSN}
		}, 0, []Option{header(1, 0)}},
		{"11.5/task management without F", func(sess *Session) Message {
			return &pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMLogicalUnitReset,
				LUN: LUN(1), TaskTag: 1, CmdSN: sess.CmdSN}
		}, 0, []Option{header(1, 5)}},
		{"11.5.2/task management with data", func(sess *Session) Message {
			return &pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMLogicalUnitReset,
				LUN: LUN(1), TaskTag: 1, CmdSN: sess.CmdSN}
		}, 8, nil},
		{"11.14.2/logout with data", func(sess *Session) Message {
			return &pdu.LogoutRequest{Immediate: true, TaskTag: 1, CmdSN: sess.CmdSN}
		}, 8, nil},
		{"11.10.2/text with F and C", func(sess *Session) Message {
			return &pdu.TextRequest{Final: true, Continue: true, TaskTag: 1,
				TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN}
		}, 8, nil},
		{"13.12/data segment over the target's limit", func(sess *Session) Message {
			return &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag,
				CmdSN: sess.CmdSN}
		}, 1 << 19, nil},
		{"11.2.1.6/a data segment of 16 MiB announced", func(sess *Session) Message {
			return &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag,
				CmdSN: sess.CmdSN}
		}, 4, []Option{WithHeader(func(h *pdu.Header) { h.SetDataLen(pdu.MaxDataLen) })}},
		{"11.2.1.2/unassigned opcode",
			func(*Session) Message { return rawMessage{0: 0x07, 1: 0x80} }, 0, nil},
		{"11.2.1.2/vendor-specific opcode",
			func(*Session) Message { return rawMessage{0: 0x1c, 1: 0x80} }, 100, nil},
		{"11.2.1.2/opcode of a target", func(*Session) Message {
			return &pdu.SCSIResponse{TaskTag: 1}
		}, 0, nil},
		{"11.2.1.2/R2T from the initiator",
			func(*Session) Message { return &pdu.R2T{DesiredLength: 512, TaskTag: 1} }, 0, nil},
		{"11.2.1.2/Reject from the initiator",
			func(*Session) Message { return &pdu.Reject{Reason: 4} }, 48, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			msg := Message(command(sess))
			if tt.msg != nil {
				msg = tt.msg(sess)
			}
			// The target may close before all data is sent.
			if err := sess.Send(msg, make([]byte, tt.data), tt.opts...); err != nil {
				require.ErrorIs(t, err, ErrClosed)
			}
			list, err := sess.ExpectClosedAfter()
			require.NoError(t, err)
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
	t.Run("11.2.2.1/an additional header of an unknown type", func(t *testing.T) {
		sess.MustGood(t, with(TestUnitReady(1), WithAHS([]byte{0, 5, 9, 0, 1, 2, 3, 4})))
	})
	t.Run("11.2.2/as many additional headers as there can be", func(t *testing.T) {
		var b []byte
		for len(b) < 1020 {
			b = append(b, 0, 1, 9, 0)
		}
		sess.MustGood(t, with(TestUnitReady(1), WithAHS(b)))
	})
	t.Run("11.2.2.4/a bidirectional length for another command", func(t *testing.T) {
		sess.MustGood(t, with(TestUnitReady(1), WithAHS([]byte{0, 5, 2, 0, 0x80, 0, 0, 0})))
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
	t.Run("11.1/padding that is not zero", func(t *testing.T) {
		tag, err := sess.SendPing(true, []byte{1}, WithPadding(0xff))
		require.NoError(t, err)
		echo, err := sess.AwaitPing(tag)
		require.NoError(t, err)
		require.Equal(t, []byte{1}, echo)
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
		r, err := sess.AwaitReject(4711)
		require.NoError(t, err)
		require.Contains(t, []pdu.RejectReason{pdu.RejectSNACK, pdu.RejectProtocolError}, r.Reason)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.3/both directions", func(t *testing.T) {
		c := Read10(1, 0, 1)
		c.Edit = func(cmd *pdu.SCSICommand) { cmd.Write = true }
		_, err := sess.Do(c)
		require.NoError(t, err)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.3/the wrong direction", func(t *testing.T) {
		c := Write10(1, 0, pattern(BlockSize, 1))
		c.NoImmediate, c.NoUnsolicited = true, true
		c.Edit = func(cmd *pdu.SCSICommand) { cmd.Read, cmd.Write = true, false }
		_, err := sess.Do(c)
		require.NoError(t, err)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("4.7/LUN fields without a LUN", func(t *testing.T) {
		for _, lun := range []uint64{LUN(77), 1, 0xffffffffffffffff, 0xc101000000000000,
			LUN(1) | 1<<32} {
			c := Command{CDB: make([]byte, 6), Edit: func(cmd *pdu.SCSICommand) { cmd.LUN = lun }}
			sess.MustFail(t, c, "05/25/00")
		}
	})
	t.Run("4.7/flat space addressing is the same LUN", func(t *testing.T) {
		c := Command{CDB: make([]byte, 6),
			Edit: func(cmd *pdu.SCSICommand) { cmd.LUN = 0x4001 << 48 }}
		sess.MustGood(t, c)
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
	require.NoError(t, sess.ExpectReject(pdu.RejectTaskInProgress, pdu.OpSCSICommand, task.Tag()))
	require.NoError(t, task.Answer(r2t))
	require.True(t, task.MustFinish(t).Good())
	sess.MustGood(t, TestUnitReady(1))
}

// TestRandomInput sends random bytes, random PDUs and PDUs with random changes. The target answers
// or closes the connection. It never panics, and keeps serving others.
func TestRandomInput(t *testing.T) {
	s := start(t)
	bystander := s.login(t, other)
	seed := rand.Int63()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	junk := func(n int) []byte {
		b := make([]byte, n)
		r.Read(b)
		return b
	}
	t.Run("before login", func(t *testing.T) {
		for range 100 {
			c := MustDial(t, s.addr)
			b := junk(8 + r.Intn(3000))
			if r.Intn(2) == 0 {
				b[0] = b[0]&0xc0 | 0x03 // a Login Request, perhaps
				copy(b[4:8], []byte{0, 0, 0, 100})
			}
			_ = c.SendRaw(b)
			_ = c.Close()
		}
	})
	t.Run("in full feature phase", func(t *testing.T) {
		for i := range 150 {
			sess := s.login(t,
				LoginOptions{ISID: [6]byte{0x80, byte(i)}, HeaderDigest: r.Intn(4) == 0})
			for range 1 + r.Intn(20) {
				all := requests(sess)
				names := []string{"NOP-Out", "SCSI Command", "Task Management Request",
					"Text Request", "Data-Out", "SNACK Request"}
				msg := all[names[r.Intn(len(names))]]
				data := junk([]int{0, 0, 4, 5, 512, 5000}[r.Intn(6)])
				edit := WithHeader(func(h *pdu.Header) {
					for range r.Intn(4) {
						// Keep the length, or the next PDU's bytes would count as data. The first
						// part of this test does that.
						if i := r.Intn(48); i < 4 || i > 7 {
							h[i] = byte(r.Int())
						}
					}
					if h.Opcode() == pdu.OpTaskManagementRequest &&
						h[1]&0x7f == byte(pdu.TMTargetColdReset) {
						h[1] = 0x80 // this would end the bystander's session, too
					}
				})
				if sess.Send(msg, data, edit) != nil {
					break
				}
			}
			_ = sess.Close()
			// A late reset of this session could abort the first commands of the next one.
			testtool.Eventually(t, func() bool { return len(s.Sessions()) == 1 },
				"the session ends with its connection")
		}
	})
	require.Zero(t, s.seen.count("panic"))
	attentions(t, bystander, 1)
	bystander.MustGood(t, TestUnitReady(1))
	s.works(t)
}

// TestNothingIsLeftBehind checks that connections that come and go leave nothing behind.
func TestNothingIsLeftBehind(t *testing.T) {
	s := start(t)
	s.works(t)
	before := runtime.NumGoroutine()
	for i := range 50 {
		sess, err := Login(s.addr, LoginOptions{ISID: [6]byte{0x80, byte(i)}, Keys: solicited.Keys})
		require.NoError(t, err)
		_, err = sess.ClearAttention(1)
		require.NoError(t, err)
		c := Write10(1, 0, pattern(8*BlockSize, 1))
		c.OnR2T = HoldR2T
		_, err = sess.MustStart(t, c).AwaitR2T()
		require.NoError(t, err)
		if i%2 == 0 {
			require.NoError(t, sess.Reset())
		} else {
			require.NoError(t, sess.Close())
		}
	}
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 0 }, "sessions end")
	testtool.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+2 },
		"goroutines end: there were %d", before)
}
