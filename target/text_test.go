package target_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
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
