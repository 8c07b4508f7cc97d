package volumes

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
	"kubevirt.io/disk/volume/api"
	volumeclient "kubevirt.io/disk/volume/client"
)

// manyVolumes is how many volumes one daemon has to serve.
const manyVolumes = 1000

// TestThousandVolumes: one daemon makes a thousand volumes, finds them again after a kill, and
// serves any of them.
func TestThousandVolumes(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	v := startVolumes(t, map[string]string{"LISTEN": rig.FreePortal(t)})
	c, err := volumeclient.New(volumeclient.Options{Server: v.base})
	require.NoError(t, err)
	var all sync.WaitGroup
	names := make(chan string)
	for range 8 {
		all.Go(func() {
			for name := range names {
				if _, err := c.Put(t.Context(), name, api.Spec{Size: 1 << 20}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range manyVolumes {
		names <- fmt.Sprintf("vm%04d", i)
	}
	close(names)
	all.Wait()
	before, err := c.List(t.Context())
	require.NoError(t, err)
	require.Len(t, before, manyVolumes)
	c.Close()
	t.Logf("after making them: %s", memoryOf(t, v.Daemon))
	v.Crash()
	v.restart(t)
	c, err = volumeclient.New(volumeclient.Options{Server: v.base})
	require.NoError(t, err)
	defer c.Close()
	after, err := c.List(t.Context())
	require.NoError(t, err)
	require.Equal(t, before, after)
	t.Logf("ready after %.2f s: %s", v.Status().ReadyAfterSeconds, memoryOf(t, v.Daemon))
	luns := map[uint16]bool{}
	for _, one := range after {
		luns[one.ISCSI.LUN] = true
	}
	require.Len(t, luns, manyVolumes)

	last := after[manyVolumes-1].ISCSI.LUN
	s := targettest.MustLogin(t, portalAddress(t, v.Daemon), targettest.LoginOptions{}, last)
	require.Len(t, rig.Do(t, s, targettest.ReportLUNs(64<<10)).Data, 8+8*manyVolumes)
	data := make([]byte, 4096)
	copy(data, "the last of a thousand")
	require.True(t, rig.Do(t, s, targettest.Write10(last, 0, data)).Good())
	require.Equal(t, data, rig.Do(t, s, targettest.Read10(last, 0, 8)).Data)
	rig.Logout(t, s)
	_, err = c.Put(t.Context(), "one-more", api.Spec{Size: 1 << 30})
	require.NoError(t, err)
	require.NoError(t, c.Delete(t.Context(), "one-more", false))
}

// memoryOf returns the resident memory of a daemon, from the kernel.
func memoryOf(t *testing.T, d *rig.Daemon) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(d.PID()), "status"))
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "VmRSS") {
			return strings.Join(strings.Fields(line), " ")
		}
	}
	return ""
}
