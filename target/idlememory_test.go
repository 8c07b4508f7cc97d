package target_test

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	tt "kubevirt.io/disk/target/targettest"
)

// TestIdleSessionsLeaveMemory has many sessions work hard at once and then rest. They must give up
// memory that another session needs.
func TestIdleSessionsLeaveMemory(t *testing.T) {
	const sessions, blocks, segment = 160, 200, 512
	s := start(t, func(o *options) { o.Shared.Memory = 4 << 20 })
	all, _ := crowd(t, s, sessions, "MaxRecvDataSegmentLength", strconv.Itoa(segment))
	for _, c := range all {
		for range 2 { // the queue uses two slices in turns
			_, err := c.Do(tt.Read10(1, 0, blocks)) // GOOD, or BUSY towards the end
			require.NoError(t, err)
		}
	}
	t.Logf("%d KiB", s.MemoryInUse()>>10)
	other, err := tt.Dial(s.addr)
	require.NoError(t, err)
	c, err := other.Login(tt.LoginOptions{ISID: [6]byte{0x80, 0xff}})
	require.NoError(t, err)
	_, err = c.ClearAttention(1)
	require.NoError(t, err)
	testtool.Eventually(t, func() bool {
		r, err := c.Do(tt.Read10(1, 0, blocks))
		require.NoError(t, err)
		return r.Status == 0
	}, "there is memory for a command")
}
