package target_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// TestTextWhileCommands declares another MaxRecvDataSegmentLength while other goroutines than the
// reader answer commands.
func TestTextWhileCommands(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpAny, Delay: 30 * time.Millisecond})
	for _, length := range []string{"65536", "32768", "16384", "8192"} {
		var tasks []*tt.Task
		for i := range 8 {
			tasks = append(tasks, c.MustStart(t, tt.Read10(1, uint32(i), 1)))
		}
		_, err := c.Text(tt.KV("MaxRecvDataSegmentLength", length))
		require.NoError(t, err)
		for _, task := range tasks {
			require.True(t, task.MustFinish(t).Good())
		}
	}
}

// TestStaleRead aborts a long read whose first part hangs in the disk. The rest is not read, and
// the session goes on.
func TestStaleRead(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	before, window := s.DataInUse(), c.MaxCmdSN-c.CmdSN
	calls := s.disks[0].Calls(disktest.OpRead)
	resume, hangs := s.stall(t, disktest.OpRead)
	stale := c.MustStart(t, tt.Read10(1, 0, 4<<20/512))
	hangs(1)
	aborts(t, c, stale)
	resume()
	testtool.Eventually(t, func() bool { return s.DataInUse() <= before }, "nothing is held")
	require.Equal(t, calls+1, s.disks[0].Calls(disktest.OpRead), "the rest is not read")
	require.NoError(t, c.ExpectOnlyPing())
	require.Equal(t, window, c.MaxCmdSN-c.CmdSN, "its place in the window is given back once")
	require.Len(t, c.MustGood(t, tt.Read10(1, 0, 8)).Data, 8*512)
}

// TestHeldDataIsNotKept sends requests with unused data ahead of their turn. Their memory must be
// free again.
func TestHeldDataIsNotKept(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	before := s.DataInUse()
	late, _, _ := c.Prepare(tt.TestUnitReady(1))
	for _, cdb := range [][]byte{tt.TestUnitReady(1).CDB, tt.Read10(1, 1<<31, 1).CDB,
		tt.Read10(1, 0, 1).CDB} {
		cmd, _, _ := c.Prepare(tt.Command{LUN: 1, CDB: cdb})
		require.NoError(t, c.Send(&cmd, make([]byte, 16<<10)))
	}
	_, err := c.Ping(nil)
	require.NoError(t, err)
	require.Greater(t, s.DataInUse(), before, "they wait for their turn")
	require.NoError(t, c.Send(&late, nil))
	for range 4 {
		_, _, err := tt.Expect[pdu.SCSIResponse](c.Conn)
		require.NoError(t, err)
	}
	testtool.Eventually(t, func() bool { return s.DataInUse() <= before }, "nothing is held")
}
