package target_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// expecting changes the expected data transfer length of a command.
func expecting(c Command, n uint32) Command {
	c.Edit = func(cmd *pdu.SCSICommand) { cmd.ExpectedLength = n }
	return c
}

func TestResidualOfReads(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	data := pattern(64*BlockSize, 4)
	sess.MustGood(t, Write10(1, 0, data))
	for _, tt := range []struct {
		name                string
		command             Command
		expected            uint32
		got                 int
		overflow, underflow bool
		residual            uint32
	}{
		{"exact", Read10(1, 0, 8), 4096, 4096, false, false, 0},
		{"an odd length expected", Read10(1, 0, 8), 5, 5, true, false, 4091},
		{"nothing expected", Read10(1, 0, 8), 0, 0, true, false, 4096},
		{"more expected", Read10(1, 0, 8), 8192, 4096, false, true, 4096},
		{"no blocks asked for", Read10(1, 0, 0), 4096, 0, false, true, 4096},
		{"no data command", TestUnitReady(1), 512, 0, false, true, 512},
		{"INQUIRY, long allocation", Inquiry(1, 0xffff), 0xffff, -1, false, true, 0},
		{"INQUIRY, shorter expectation", Inquiry(1, 36), 20, 20, true, false, 16},
		{"11.4.5.3/REPORT LUNS that does not fit its allocation length", ReportLUNs(16), 16, 16,
			false, false, 0},
	} {
		t.Run("11.4.5.1/"+tt.name, func(t *testing.T) {
			c := tt.command
			c.Edit = func(cmd *pdu.SCSICommand) { cmd.Read, cmd.ExpectedLength = true, tt.expected }
			r := sess.MustGood(t, c)
			if tt.got >= 0 {
				require.Len(t, r.Data, tt.got)
				require.Equal(t, tt.residual, r.Residual)
			} else {
				require.Equal(t, tt.expected-uint32(len(r.Data)), r.Residual)
			}
			require.Equal(t, []bool{tt.overflow, tt.underflow}, []bool{r.Overflow, r.Underflow})
			if c.CDB[0] == 0x28 {
				require.Equal(t, string(data[:tt.got]), string(r.Data))
			}
		})
	}
	t.Run("11.4.5.1/a command of the other direction", func(t *testing.T) {
		for name, c := range map[string]Command{"a read": Read10(1, 0, 8),
			"a write": Write10(1, 0, pattern(8*BlockSize, 9))} {
			read := c.Read > 0
			c.Write = nil
			c.Edit = func(cmd *pdu.SCSICommand) {
				cmd.Read, cmd.Write, cmd.ExpectedLength = !read, read, 8*BlockSize
			}
			r := sess.MustGood(t, c)
			require.Empty(t, r.Data, name)
			require.Equal(t, []any{true, false, uint32(8 * BlockSize)},
				[]any{r.Overflow, r.Underflow, r.Residual}, name)
		}
		require.Equal(t, data[:8*BlockSize], sess.MustGood(t, Read10(1, 0, 8)).Data)
	})
	t.Run("11.3/a write of nothing, and the F bit is 0", func(t *testing.T) {
		for _, write := range []bool{true, false} {
			c := Command{LUN: 1, CDB: Write10(1, 0, make([]byte, BlockSize)).CDB}
			c.Edit = func(cmd *pdu.SCSICommand) {
				cmd.Final, cmd.Write, cmd.ExpectedLength = false, write, 0
			}
			r := sess.MustGood(t, c) // there is no data to wait for
			require.Equal(t, []any{true, uint32(BlockSize)}, []any{r.Overflow, r.Residual})
		}
	})
	t.Run("11.4.5.1/after an error in the middle", func(t *testing.T) {
		// Reads of the second half of the range fail.
		remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Off: 1 << 20,
			Length: 1 << 20, Err: errors.New("bad sectors")})
		defer remove()
		r := sess.MustDo(t, Read10(1, 0, 4096))
		require.Equal(t, StatusCheckCondition, r.Status)
		require.LessOrEqual(t, len(r.Data), 1<<20)
		require.True(t, r.Underflow)
		require.Equal(t, uint32(2<<20-len(r.Data)), r.Residual)
	})
}

// TestResidualOfWrites: more is expected than the CDB takes. TestWriteThatIsCutShort has the
// reverse.
func TestResidualOfWrites(t *testing.T) {
	s := start(t)
	for _, o := range []LoginOptions{{}, solicited} {
		sess := s.login(t, o)
		zeros, data := make([]byte, 32*BlockSize), pattern(16*BlockSize, 5)
		for _, blocks := range []int{16, 10, 0} { // in the CDB
			t.Run(fmt.Sprintf("11.4.5.1/%d of 16 blocks", blocks), func(t *testing.T) {
				sess.MustGood(t, Write10(1, 40, zeros))
				c := Write10(1, 40, data)
				c.CDB[8] = byte(blocks)
				r := sess.MustGood(t, c)
				require.Equal(t, []bool{false, blocks < 16}, []bool{r.Overflow, r.Underflow})
				require.EqualValues(t, (16-blocks)*BlockSize, r.Residual)
				got, written := sess.MustGood(t, Read10(1, 40, 32)).Data, blocks*BlockSize
				require.Equal(t, data[:written], got[:written])
				require.Equal(t, zeros[written:], got[written:], "the rest is unchanged")
				for _, r2t := range r.R2Ts {
					require.LessOrEqual(t, int(r2t.BufferOffset+r2t.DesiredLength), written,
						"the target asks only for data that it uses")
				}
			})
		}
	}
}

// TestExpectedLengthCostsNothing checks that a large expected length takes no memory: the target
// allocates by the CDB, and as data comes. (tgtd 1.0.85 grows by several GiB here.)
func TestExpectedLengthCostsNothing(t *testing.T) {
	s := start(t)
	sess := s.login(t, solicited)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 64 {
		c := expecting(Write10(1, uint32(i), pattern(BlockSize, 1)), math.MaxUint32)
		if i%2 == 0 {
			c = Read10(1, uint32(i), 1)
			c.Edit = func(cmd *pdu.SCSICommand) { cmd.ExpectedLength = math.MaxUint32 }
		}
		r := sess.MustGood(t, c)
		require.True(t, r.Underflow)
		require.Equal(t, uint32(math.MaxUint32-BlockSize), r.Residual)
	}
	// Now leave commands open: each announces 4 GiB and waits for data.
	for i := range 64 {
		c := expecting(Write10(1, uint32(i), pattern(BlockSize, 1)), math.MaxUint32)
		c.OnR2T = HoldR2T
		require.NoError(t, testtool.Err(sess.MustStart(t, c).AwaitR2T()))
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(8<<20),
		"allocated bytes, including the test's own")
}

// TestWriteThatIsCutShort sends writes whose expected data transfer length is less than the CDB
// asks for, in every way. When they are acknowledged, all offered data is on the disk. The response
// reports the overflow (RFC 7143 11.4.5).
func TestWriteThatIsCutShort(t *testing.T) {
	s := start(t)
	const blocks, lba = 1100, 31
	write10 := Write10(1, lba, make([]byte, blocks*BlockSize)).CDB
	before := pattern(blocks*BlockSize, 77)
	for _, way := range []struct {
		name string
		keys Keys
	}{
		{"immediate data", KV("InitialR2T", "Yes", "ImmediateData", "Yes")},
		{"unsolicited data", KV("InitialR2T", "No", "ImmediateData", "No")},
		{"both", KV("InitialR2T", "No", "ImmediateData", "Yes", "FirstBurstLength", "1000",
			"MaxBurstLength", "3001")},
		{"R2T", KV("InitialR2T", "Yes", "ImmediateData", "No")},
		{"R2T of odd lengths", KV("InitialR2T", "Yes", "ImmediateData", "No", "FirstBurstLength",
			"512", "MaxBurstLength", "4099")},
	} {
		sess := s.login(t, LoginOptions{Keys: way.keys})
		for _, c := range []struct {
			name string
			cdb  []byte
		}{
			{"WRITE(10)", write10},
			{"WRITE AND VERIFY(16)", cdb16(0x8e, 2, lba, blocks)},
		} {
			for _, n := range []int{1, 200, 511, 513, 4096, 512<<10 + 1} {
				t.Run(fmt.Sprintf("11.4.5/%s by %s, %d bytes", c.name, way.name, n),
					func(t *testing.T) {
						sess.MustGood(t, Write10(1, lba, before))
						data := pattern(n, 5)
						r := sess.MustGood(t, Command{LUN: 1, CDB: c.cdb, Write: data})
						require.Equal(t, []any{true, false, uint32(blocks*BlockSize - n)},
							[]any{r.Overflow, r.Underflow, r.Residual})
						want := bytes.Clone(before)
						copy(want, data)
						require.True(t, bytes.Equal(want, sess.MustGood(t, Read10(1, lba,
							blocks)).Data))
					})
			}
		}
	}
}

// TestCutWriteWithoutItsData checks that a cut write changes nothing if it is aborted while it
// waits for data, and fails if it loses its data.
func TestCutWriteWithoutItsData(t *testing.T) {
	s := start(t)
	sess := s.login(t, solicited)
	before := pattern(8*BlockSize, 77)
	sess.MustGood(t, Write10(1, 8, before))
	write := Write10(1, 8, pattern(8*BlockSize, 5))
	write.Write = write.Write[:BlockSize+200]
	write.OnR2T = HoldR2T
	task := sess.MustStart(t, write)
	r2t := testtool.Must(task.AwaitR2T())(t)
	require.EqualValues(t, BlockSize+200, r2t.DesiredLength)
	aborts(t, sess, task)
	require.NoError(t, task.DataOut(pdu.DataOut{Final: true, TransferTag: r2t.TransferTag},
		write.Write))
	require.Equal(t, before, sess.MustGood(t, Read10(1, 8, 8)).Data)

	write.OnR2T = func(task *Task, r pdu.R2T) error {
		return task.DataOut(pdu.DataOut{Final: true, TransferTag: r.TransferTag},
			write.Write[:BlockSize+1])
	}
	sess.MustFail(t, write, "0B/0C/0D")
	require.Equal(t, before, sess.MustGood(t, Read10(1, 8, 8)).Data)
}

// TestBothDirections sets R and W both, as in a bidirectional command, with a length for the other
// direction (RFC 7143 11.3.4). The target has no such command: the CDB decides in which direction
// the data moves, and the expected length holds for it.
func TestBothDirections(t *testing.T) {
	const n = 8 * BlockSize
	data, other := pattern(n, 1), pattern(n, 2)
	type residuals struct {
		overflow, underflow bool
		n                   uint32
	}
	none := residuals{}
	for _, tt := range []struct {
		name     string
		command  Command
		expected uint32
		got      int // bytes read
		written  int
		want     residuals
	}{
		{"READ", Read10(1, 8, 8), n, n, 0, none},
		{"READ, less expected", Read10(1, 8, 8), 1000, 1000, 0, residuals{true, false, n - 1000}},
		{"READ, more expected", Read10(1, 8, 8), 2 * n, n, 0, residuals{false, true, n}},
		{"WRITE", Write10(1, 8, other), n, 0, n, none},
		{"no data", TestUnitReady(1), 100, 0, 0, residuals{false, true, 100}},
		{"READ that fails", Read10(1, diskSize/BlockSize, 8), n, 0, 0, residuals{false, true, n}},
	} {
		t.Run("11.3.4/"+tt.name, func(t *testing.T) {
			s := start(t)
			sess := s.login(t, LoginOptions{})
			sess.MustGood(t, Write10(1, 8, data))
			cmd, immediate, _ := sess.Prepare(tt.command)
			cmd.Read, cmd.Write, cmd.ExpectedLength = true, true, tt.expected
			require.NoError(t, sess.Send(&cmd, immediate, WithAHS([]byte{0, 5, 2, 0, 0, 0, 2, 0})))
			var got []byte
			var r residuals
			for done := false; !done; {
				p := testtool.Must(sess.Receive())(t)
				if p.Header.Opcode() == pdu.OpSCSIResponse {
					var resp pdu.SCSIResponse
					require.NoError(t, resp.Decode(&p.Header))
					r = residuals{resp.Overflow, resp.Underflow, resp.Residual}
					break
				}
				var in pdu.DataIn
				require.NoError(t, in.Decode(&p.Header))
				got = append(got, p.Data...)
				r, done = residuals{in.Overflow, in.Underflow, in.Residual}, in.HasStatus
			}
			require.Equal(t, tt.want, r)
			require.Equal(t, string(data[:tt.got]), string(got))
			want := append(bytes.Clone(other[:tt.written]), data[tt.written:]...)
			check := s.login(t, LoginOptions{ISID: [6]byte{0x80, 7}})
			require.Equal(t, want, check.MustGood(t, Read10(1, 8, 8)).Data)
		})
	}
}
