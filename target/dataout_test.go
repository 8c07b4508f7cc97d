package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// solicited is a login after which the target must ask for all data.
var solicited = LoginOptions{Keys: KV("InitialR2T", "Yes", "ImmediateData", "No")}

func TestWriteData(t *testing.T) {
	s := start(t)
	t.Run("13.11/the initiator may leave unsolicited data out", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		data := pattern(100*BlockSize, 9)
		c := Write10(1, 0, data)
		c.NoImmediate, c.NoUnsolicited = true, true
		require.Zero(t, sess.MustGood(t, c).R2Ts[0].BufferOffset)
		c.NoImmediate = false
		sess.MustGood(t, c)
		require.Equal(t, data, sess.MustGood(t, Read10(1, 0, 100)).Data)
	})
	t.Run("11.7/Data-Out PDUs of any length, empty ones too", func(t *testing.T) {
		sess := s.login(t, solicited)
		data := pattern(16*BlockSize, 5)
		c := Write10(1, 4, data)
		c.OnR2T = func(task *Task, r pdu.R2T) error {
			at, sn := int(r.BufferOffset), uint32(0)
			end := at + int(r.DesiredLength)
			for _, n := range []int{0, 1, 3, 513, 0, 4096, end} {
				n = min(n, end-at)
				p := pdu.DataOut{TransferTag: r.TransferTag, DataSN: sn, BufferOffset: uint32(at),
					Final: at+n == end}
				if err := task.DataOut(p, data[at:at+n]); err != nil {
					return err
				}
				at, sn = at+n, sn+1
			}
			return nil
		}
		sess.MustGood(t, c)
		require.Equal(t, data, sess.MustGood(t, Read10(1, 4, 16)).Data)
	})
	t.Run("11.3/immediate data of odd lengths", func(t *testing.T) {
		sess := s.login(t, LoginOptions{Keys: KV("InitialR2T", "Yes", "FirstBurstLength", "4096")})
		data := pattern(8*BlockSize, 6)
		for _, n := range []int{1, 2, 3, 511, 513, 4095} {
			cmd, _, _ := sess.Prepare(Write10(1, 4, data))
			require.NoError(t, sess.Send(&cmd, data[:n]))
			r2t, _ := testtool.Must2(Expect[pdu.R2T](sess.Conn))(t)
			require.Equal(t, []uint32{uint32(n), uint32(len(data) - n)},
				[]uint32{r2t.BufferOffset, r2t.DesiredLength})
			require.NoError(t,
				sess.Send(&pdu.DataOut{Final: true, LUN: LUN(1), TaskTag: cmd.TaskTag,
					TransferTag: r2t.TransferTag, BufferOffset: r2t.BufferOffset}, data[n:]))
			done(t, sess, &cmd)
			require.Equal(t, data, sess.MustGood(t, Read10(1, 4, 8)).Data)
		}
	})
	t.Run("13.17/one R2T at a time", func(t *testing.T) {
		sess := s.login(t, LoginOptions{Keys: KV("InitialR2T", "Yes", "ImmediateData", "No",
			"MaxBurstLength", "1024", "FirstBurstLength", "512", "MaxOutstandingR2T", "1")})
		c := Write10(1, 0, pattern(8*BlockSize, 1))
		c.OnR2T = HoldR2T
		task := sess.MustStart(t, c)
		for i := range 4 {
			r2t := testtool.Must(task.AwaitR2T())(t)
			require.Equal(t, uint32(i*1024), r2t.BufferOffset)
			require.NoError(t, sess.ExpectOnlyPing(), "no second R2T before the first has its data")
			require.NoError(t, task.Answer(r2t))
		}
		require.True(t, task.MustFinish(t).Good())
	})
	t.Run("11.8/transfer tags are not reused at once", func(t *testing.T) {
		sess := s.login(t, solicited)
		seen := map[uint32]bool{}
		for range 50 {
			for _, r := range sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1))).R2Ts {
				require.False(t, seen[r.TransferTag])
				seen[r.TransferTag] = true
			}
		}
	})
	t.Run("4.2.2/data of several commands may be interleaved", func(t *testing.T) {
		sess := s.login(t, solicited)
		var tasks []*Task
		for i := range 8 {
			c := Write10(1, uint32(i*8), pattern(8*BlockSize, byte(i)))
			c.OnR2T = HoldR2T
			tasks = append(tasks, sess.MustStart(t, c))
		}
		for i := len(tasks) - 1; i >= 0; i-- {
			require.NoError(t, tasks[i].Answer(testtool.Must(tasks[i].AwaitR2T())(t)))
		}
		for i, task := range tasks {
			require.True(t, task.MustFinish(t).Good())
			require.Equal(t, pattern(8*BlockSize, byte(i)),
				sess.MustGood(t, Read10(1, uint32(i*8), 8)).Data)
		}
	})
	s.works(t)
}

// TestWriteDataErrors answers an R2T for 4096 bytes wrongly. The target writes no wrong data, the
// session goes on, and the next write works.
func TestWriteDataErrors(t *testing.T) {
	s := start(t)
	old := pattern(8*BlockSize, 1)
	const n = 8 * BlockSize
	// Each PDU has the length of its data, and what is added to the transfer tag of the R2T.
	for _, tt := range []struct {
		name string
		outs []pdu.DataOut
		opts []Option
		// "": the target drops or rejects the PDU, and the right data still counts
		want string
	}{
		{"7.9/DataSN begins at 1", []pdu.DataOut{{Final: true, DataSN: 1, DataLen: n}}, nil,
			"0B/47/05"},
		{"7.9/a hole in DataSN", []pdu.DataOut{{DataLen: n / 2},
			{Final: true, DataSN: 2, BufferOffset: n / 2, DataLen: n / 2}}, nil, "0B/47/05"},
		{"11.7.6/wrong offset", []pdu.DataOut{{Final: true, BufferOffset: 512, DataLen: n}}, nil,
			"0B/4B/00"},
		{"11.7.6/offset goes back", []pdu.DataOut{{DataLen: n / 2},
			{Final: true, DataSN: 1, DataLen: n / 2}}, nil, "0B/4B/00"},
		{"11.4.7.2/more than the R2T asks for", []pdu.DataOut{{Final: true, DataLen: n + 512}},
			nil, "0B/0C/0D"},
		{"11.4.7.2/less than the R2T asks for", []pdu.DataOut{{Final: true, DataLen: n - 512}},
			nil, "0B/0C/0D"},
		{"11.8/complete, but without the F bit, and then more", []pdu.DataOut{{DataLen: n},
			{Final: true, DataSN: 1, BufferOffset: n, DataLen: 4}}, nil, "0B/0C/0D"},
		{"11.8.5/an unknown transfer tag",
			[]pdu.DataOut{{Final: true, TransferTag: 1000, DataLen: n}}, nil, ""},
		{"11.7.4/unsolicited data instead of solicited data",
			[]pdu.DataOut{{Final: true, TransferTag: pdu.ReservedTag, DataLen: n}}, nil, ""},
		{"11.7/a task that does not exist", []pdu.DataOut{{Final: true, DataLen: n}},
			[]Option{WithHeader(func(h *pdu.Header) { h[16] ^= 0x40 })}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess := s.login(t, solicited)
			sess.MustGood(t, Write10(1, 200, old))
			fresh := pattern(n, 7)
			c := Write10(1, 200, fresh)
			c.OnR2T = func(task *Task, r pdu.R2T) error {
				for _, out := range tt.outs {
					if out.TransferTag != pdu.ReservedTag {
						out.TransferTag += r.TransferTag
					}
					err := task.DataOut(out, make([]byte, out.DataLen), tt.opts...)
					if err != nil {
						return err
					}
				}
				if tt.want == "" {
					return task.Answer(r)
				}
				return nil
			}
			task := sess.MustStart(t, c)
			r := awaitResult(t, task)
			content := sess.MustGood(t, Read10(1, 200, 8)).Data
			if tt.want == "" {
				require.True(t, r.Good(), r.Failed())
				require.Equal(t, fresh, content)
			} else {
				require.Equal(t, tt.want, r.Failed())
				require.Equal(t, old, content)
			}
			sess.Inbox()
			require.NoError(t, sess.ExpectOnlyPing())
			sess.MustGood(t, Write10(1, 200, fresh))
		})
	}
	s.works(t)
}

// failure receives the response to a command that has failed, and returns its sense and residual.
func failure(t *testing.T, sess *Session, tag uint32) (string, uint32) {
	t.Helper()
	r, sense := testtool.Must2(Expect[pdu.SCSIResponse](sess.Conn))(t)
	require.Equal(t, tag, r.TaskTag)
	return testtool.Must(ParseSense(sense[2:]))(t).String(), r.Residual
}

// awaitResult is MustFinish for a task whose data may be rejected in part.
func awaitResult(t *testing.T, task *Task) *Result {
	t.Helper()
	for {
		r, err := task.Finish()
		if _, rejected := ReasonOf(err); rejected && !task.Done() {
			task.Resume()
			continue
		}
		require.NoError(t, err)
		return r
	}
}

// TestUnsolicitedData sends unsolicited data that was not negotiated (13.10, 13.11).
func TestUnsolicitedData(t *testing.T) {
	s := start(t)
	data := pattern(16*BlockSize, 7)
	for _, tt := range []struct {
		name      string
		keys      Keys
		final     bool
		immediate int
		dataOut   []int // lengths of unsolicited Data-Out PDUs, the last one with the F bit
		want      string
	}{
		{"13.11/immediate data and ImmediateData is No", KV("ImmediateData", "No"), true, 512, nil,
			"0B/0C/0C"},
		{"13.10/Data-Out and InitialR2T is Yes", KV("InitialR2T", "Yes"), false, 0, []int{512},
			"0B/0C/0C"},
		{"13.10/immediate data and Data-Out, and InitialR2T is Yes", KV("InitialR2T", "Yes"), false,
			512, []int{512}, "0B/0C/0C"},
		{"13.14/immediate data over FirstBurstLength", KV("FirstBurstLength", "512"), true, 1024,
			nil, "0B/0C/0C"},
		{"13.14/Data-Out over FirstBurstLength", KV("FirstBurstLength", "1024"), false, 0,
			[]int{2048}, "0B/0C/0C"},
		{"13.14/together over FirstBurstLength", KV("FirstBurstLength", "1024"), false, 512,
			[]int{512, 512}, "0B/0C/0C"},
		{"11.4.7.2/Data-Out ends before FirstBurstLength", KV("FirstBurstLength", "4096"), false, 0,
			[]int{512}, "0B/0C/0D"},
		{"11.4.7.2/immediate data, and Data-Out ends early", KV("FirstBurstLength", "4096"), false,
			512, []int{512, 512}, "0B/0C/0D"},
		{"13.14/exactly FirstBurstLength", KV("FirstBurstLength", "2048"), false, 512,
			[]int{512, 1024}, ""},
		{"13.14/Data-Out alone", KV("FirstBurstLength", "2048", "ImmediateData", "No"), false, 0,
			[]int{2048}, ""},
		{"13.11/immediate data alone", KV("FirstBurstLength", "2048", "InitialR2T", "Yes"), true,
			2048, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{Keys: tt.keys})
			before := sess.MustGood(t, Read10(1, 300, 16)).Data
			c := Write10(1, 300, data)
			c.NoImmediate, c.NoUnsolicited = true, true
			cmd, _, _ := sess.Prepare(c)
			cmd.Final = tt.final
			require.NoError(t, sess.Send(&cmd, data[:tt.immediate]))
			at := tt.immediate
			for i, n := range tt.dataOut {
				require.NoError(t,
					sess.Send(&pdu.DataOut{Final: i == len(tt.dataOut)-1, LUN: cmd.LUN,
						TaskTag: cmd.TaskTag, TransferTag: pdu.ReservedTag, DataSN: uint32(i),
						BufferOffset: uint32(at)}, data[at:at+n]))
				at += n
			}
			if tt.want == "" {
				r2t, _ := testtool.Must2(Expect[pdu.R2T](sess.Conn))(t)
				require.Equal(t, []uint32{2048, uint32(len(data) - 2048)},
					[]uint32{r2t.BufferOffset, r2t.DesiredLength})
				require.NoError(t,
					sess.Send(&pdu.DataOut{Final: true, LUN: cmd.LUN, TaskTag: cmd.TaskTag,
						TransferTag: r2t.TransferTag, BufferOffset: 2048}, data[2048:]))
				done(t, sess, &cmd)
				require.Equal(t, data, sess.MustGood(t, Read10(1, 300, 16)).Data)
				sess.MustGood(t, Write10(1, 300, make([]byte, len(data))))
				return
			}
			got, _ := failure(t, sess, cmd.TaskTag)
			require.Equal(t, tt.want, got)
			require.NoError(t, sess.ExpectOnlyPing(), "the data is skipped")
			require.Equal(t, before, sess.MustGood(t, Read10(1, 300, 16)).Data,
				"nothing was written")
		})
	}
	t.Run("11.4.2/a command that fails is answered after its unsolicited data",
		func(t *testing.T) {
			unknown := Write10(1, 0, data)
			unknown.CDB[0] = 0xff
			for want, c := range map[string]Command{"05/21/00": Write10(1, diskSize/BlockSize-1,
				data),
				"05/25/00": Write10(9, 0, data), "05/20/00": unknown} {
				sess := s.login(t, LoginOptions{Keys: KV("InitialR2T", "No")})
				cmd, _, _ := sess.Prepare(c)
				cmd.Final = false
				require.NoError(t, sess.Send(&cmd, data[:512]))
				out := pdu.DataOut{LUN: cmd.LUN, TaskTag: cmd.TaskTag, TransferTag: pdu.ReservedTag,
					BufferOffset: 512}
				require.NoError(t, sess.Send(&out, data[512:1024]))
				require.NoError(t, sess.ExpectOnlyPing(), "more is to come")
				out.Final, out.DataSN, out.BufferOffset = true, 1, 1024
				require.NoError(t, sess.Send(&out, data[1024:]))
				got, residual := failure(t, sess, cmd.TaskTag)
				require.Equal(t, want, got)
				require.Equal(t, cmd.ExpectedLength, residual)
				require.NoError(t, sess.ExpectOnlyPing())
			}
		})
	t.Run("7.1/a write that fails in the disk ends in an error", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Err: errDisk})
		r := sess.MustDo(t, Write10(1, 0, pattern(600*BlockSize, 1)))
		remove()
		require.Equal(t, StatusCheckCondition, r.Status)
		require.Contains(t, []uint8{3, 4}, r.Sense.Key)
		sess.MustGood(t, Write10(1, 0, data))
	})
	s.works(t)
}
