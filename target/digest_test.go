package target_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

var bothDigests = LoginOptions{HeaderDigest: true, DataDigest: true}

func TestDigests(t *testing.T) {
	s := start(t)
	data := pattern(700*BlockSize, 2)
	for _, header := range []bool{false, true} {
		for _, payload := range []bool{false, true} {
			t.Run(fmt.Sprintf("13.1/header %t data %t", header, payload), func(t *testing.T) {
				sess := s.login(t, LoginOptions{HeaderDigest: header, DataDigest: payload})
				require.Equal(t, []bool{header, payload},
					[]bool{sess.Params.HeaderDigest, sess.Params.DataDigest})
				sess.MustGood(t, Write10(1, 0, data))
				require.Equal(t, data, sess.MustGood(t, Read10(1, 0, 700)).Data)
				// Every length of padding, in both directions.
				for n := range 9 {
					echo := testtool.Must(sess.Ping(data[:n]))(t)
					require.Equal(t, string(data[:n]), string(echo))
				}
				require.NoError(t, testtool.Err(sess.Text(KV("SendTargets", ""))))
			})
		}
	}
	t.Run("13.1/padding counts, whatever its value", func(t *testing.T) {
		sess := s.login(t, bothDigests)
		tag := testtool.Must(sess.SendPing(true, []byte{1, 2, 3}, WithPadding(0xa5)))(t)
		require.Equal(t, []byte{1, 2, 3}, testtool.Must(sess.AwaitPing(tag))(t))
	})
	t.Run("13.1/additional headers are in the header digest", func(t *testing.T) {
		sess := s.login(t, bothDigests)
		c := TestUnitReady(1)
		c.Options = []Option{WithAHS([]byte{0, 5, 9, 0, 1, 2, 3, 4})}
		sess.MustGood(t, c)
	})
	t.Run("6.3/the login phase has none", func(t *testing.T) {
		// The login is the proof: Conn uses digests only after the final response.
		s.login(t, LoginOptions{HeaderDigest: true, DataDigest: true, WithSecurity: true})
	})
}

// requests returns one PDU of every type that an initiator sends.
func requests(sess *Session) map[string]Message {
	return map[string]Message{
		"NOP-Out": &pdu.NOPOut{Immediate: true, TaskTag: 900,
			TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN},
		"SCSI Command": &pdu.SCSICommand{Final: true, TaskTag: 901, LUN: LUN(1),
			CmdSN: sess.CmdSN},
		"Task Management Request": &pdu.TaskManagementRequest{Immediate: true,
			Function: pdu.TMAbortTaskSet, TaskTag: 902, LUN: LUN(1), CmdSN: sess.CmdSN},
		"Text Request": &pdu.TextRequest{Final: true, TaskTag: 903,
			TransferTag: pdu.ReservedTag, CmdSN: sess.CmdSN},
		"Data-Out": &pdu.DataOut{Final: true, TaskTag: 904, TransferTag: 5,
			LUN: LUN(1)},
		"Logout Request": &pdu.LogoutRequest{Immediate: true,
			Reason: pdu.LogoutCloseSession, TaskTag: 905, CmdSN: sess.CmdSN},
		"SNACK Request": snack(pdu.ReservedTag),
	}
}

func TestHeaderDigestError(t *testing.T) {
	s := start(t)
	for name := range requests(&Session{Conn: &Conn{}}) {
		t.Run("7.8/"+name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{HeaderDigest: true})
			require.NoError(t, sess.Send(requests(sess)[name], nil, WrongHeaderDigest()))
			require.NoError(t, sess.ExpectClosed(), "the connection closes, without an answer")
		})
	}
	t.Run("7.8/any bit of the header", func(t *testing.T) {
		for bit := 0; bit < 48*8; bit += 5 {
			sess := s.login(t, LoginOptions{HeaderDigest: true})
			require.NoError(t, sess.Send(requests(sess)["SCSI Command"], nil, FlipHeaderBit(bit)))
			// A bit of a length makes the target wait for more data: send some.
			require.NoError(t, sess.SendRaw(make([]byte, 2048)))
			require.NoError(t, sess.ExpectClosed(), "bit %d", bit)
		}
	})
	testtool.Eventually(t, func() bool { return s.seen.count("ended header_digest") > 70 },
		"sessions end for the header digest")
	s.works(t)
}

func TestDataDigestError(t *testing.T) {
	s := start(t)
	t.Run("7.8/NOP-Out", func(t *testing.T) {
		sess := s.login(t, bothDigests)
		tag := testtool.Must(sess.SendPing(true, []byte("hello"), WrongDataDigest()))(t)
		require.Equal(t, pdu.RejectDataDigest, testtool.Must(sess.AwaitReject(tag))(t).Reason)
		require.NoError(t, sess.ExpectOnlyPing())
	})
	t.Run("7.8/immediate data", func(t *testing.T) {
		sess := s.login(t, bothDigests)
		old, data := pattern(BlockSize, 1), pattern(BlockSize, 2)
		sess.MustGood(t, Write10(1, 50, old))
		c := Write10(1, 50, data)
		c.Options = []Option{WrongDataDigest()}
		r := sess.MustDo(t, c)
		require.Len(t, r.Rejects, 1)
		require.Equal(t, pdu.RejectDataDigest, r.Rejects[0].Reason)
		require.Equal(t, "0B/47/05", r.Failed())
		require.Equal(t, old, sess.MustGood(t, Read10(1, 50, 1)).Data, "nothing was written")
		c.Options = nil
		sess.MustGood(t, c)
		require.Equal(t, data, sess.MustGood(t, Read10(1, 50, 1)).Data)
	})
	// damaged sends some of the four Data-Out PDUs of a sequence with a flipped bit.
	for _, damaged := range [][]int{{0}, {1}, {2}, {3}, {0, 1, 2, 3}} {
		t.Run(fmt.Sprintf("7.8/Data-Out %v of 4", damaged), func(t *testing.T) {
			sess := s.login(t, LoginOptions{DataDigest: true, Keys: solicited.Keys})
			old := pattern(64*BlockSize, 3)
			sess.MustGood(t, Write10(1, 500, old))
			c := Write10(1, 500, pattern(64*BlockSize, 4))
			c.OnR2T = func(task *Task, r pdu.R2T) error {
				n := int(r.DesiredLength) / 4
				for i := range 4 {
					var opts []Option
					if slices.Contains(damaged, i) {
						opts = append(opts, FlipDataBit(77))
					}
					if err := task.DataOut(pdu.DataOut{Final: i == 3, TransferTag: r.TransferTag,
						DataSN: uint32(i), BufferOffset: r.BufferOffset + uint32(i*n)},
						make([]byte, n), opts...); err != nil {
						return err
					}
				}
				return nil
			}
			r := sess.MustDo(t, c)
			require.Equal(t, "0B/47/05", r.Failed())
			require.GreaterOrEqual(t, len(r.Rejects), len(damaged))
			require.Equal(t, pdu.RejectDataDigest, r.Rejects[0].Reason)
			require.Equal(t, pdu.OpDataOut, r.Rejects[0].Header.Opcode())
			require.NoError(t, sess.ExpectOnlyPing(), "the rest of the sequence is dropped")
			require.Equal(t, old, sess.MustGood(t, Read10(1, 500, 64)).Data)
			sess.MustGood(t, Write10(1, 500, old))
		})
	}
	t.Run("7.8/the response waits for the end of the sequence", func(t *testing.T) {
		sess := s.login(t, LoginOptions{DataDigest: true, Keys: solicited.Keys})
		task, r2t := waiting(t, sess, 1, 500, pattern(8*BlockSize, 4))
		require.NoError(t, task.DataOut(pdu.DataOut{TransferTag: r2t.TransferTag},
			make([]byte, 2048), WrongDataDigest()))
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		stray := sess.Inbox()
		require.Len(t, stray, 1, "the Reject, and no response yet")
		require.Equal(t, pdu.OpReject, stray[0].Header.Opcode())
		require.False(t, task.Done(), "the response comes before the sequence has ended")
		require.NoError(t, task.DataOut(pdu.DataOut{Final: true, TransferTag: r2t.TransferTag,
			DataSN: 1, BufferOffset: 2048}, make([]byte, 2048)))
		require.Equal(t, "0B/47/05", task.MustFinish(t).Failed())
	})
	t.Run("7.8/unsolicited Data-Out", func(t *testing.T) {
		sess := s.login(t, LoginOptions{DataDigest: true,
			Keys: KV("ImmediateData", "No", "FirstBurstLength", "4096")})
		c := Write10(1, 500, pattern(8*BlockSize, 4))
		c.NoUnsolicited = true
		c.Edit = func(cmd *pdu.SCSICommand) { cmd.Final = false }
		task := sess.MustStart(t, c)
		require.NoError(t, task.SendData(pdu.ReservedTag, 0, make([]byte, 4096), WrongDataDigest()))
		r := task.MustFinish(t)
		require.Equal(t, "0B/47/05", r.Failed())
		require.Len(t, r.Rejects, 1)
	})
	t.Run("7.8/a SCSI Command with unused data", func(t *testing.T) {
		sess := s.login(t, bothDigests)
		tag := sess.NewTag()
		require.NoError(t, sess.Send(&pdu.SCSICommand{Final: true, TaskTag: tag, LUN: LUN(1),
			CmdSN: sess.CmdSN}, make([]byte, 10), WrongDataDigest()))
		require.Equal(t, pdu.RejectDataDigest, testtool.Must(sess.AwaitReject(tag))(t).Reason)
	})
	s.works(t)
}
