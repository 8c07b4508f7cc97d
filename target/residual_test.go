package target_test

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
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
				cmd.Read, cmd.Write, cmd.ExpectedLength = !read,
					read, 8*BlockSize
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
				cmd.Final, cmd.Write, cmd.ExpectedLength = false,
					write, 0
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
		_, err := sess.MustStart(t, c).AwaitR2T()
		require.NoError(t, err)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(8<<20),
		"allocated bytes, including the test's own")
}
