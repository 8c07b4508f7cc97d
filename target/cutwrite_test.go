package target_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

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
	r2t, err := task.AwaitR2T()
	require.NoError(t, err)
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
				p, err := sess.Receive()
				require.NoError(t, err)
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
