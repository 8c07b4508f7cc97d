package volumes

import (
	"fmt"
	"net"
	"net/http"
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
	c := testtool.Must(volumeclient.New(volumeclient.Options{Server: v.base}))(t)
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
	before := testtool.Must(c.List(t.Context()))(t)
	require.Len(t, before, manyVolumes)
	c.Close()
	t.Logf("after making them: %s", memoryOf(t, v.Daemon))
	v.Crash()
	v.restart(t)
	c = testtool.Must(volumeclient.New(volumeclient.Options{Server: v.base}))(t)
	defer c.Close()
	after := testtool.Must(c.List(t.Context()))(t)
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
	require.NoError(t, testtool.Err(c.Put(t.Context(), "one-more", api.Spec{Size: 1 << 30})))
	require.NoError(t, c.Delete(t.Context(), "one-more", false))
}

// memoryOf returns the resident memory of a daemon, from the kernel.
func memoryOf(t *testing.T, d *rig.Daemon) string {
	t.Helper()
	text := testtool.Must(os.ReadFile(filepath.Join("/proc", fmt.Sprint(d.PID()), "status")))(t)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "VmRSS") {
			return strings.Join(strings.Fields(line), " ")
		}
	}
	return ""
}

// TestVolumeDeleteAndFirstUse: if DELETE and the first use of a disk by an initiator coincide,
// either the disk is gone for the initiator, or DELETE is refused and the disk stays.
func TestVolumeDeleteAndFirstUse(t *testing.T) {
	const rounds = 30
	v := startVolumes(t, map[string]string{"LISTEN": rig.FreePortal(t)})
	addr, err := net.ResolveTCPAddr("tcp", v.Portals[0])
	require.NoError(t, err)
	kept := 0
	for i := range rounds {
		lun := v.put("vm1", "size: 1Mi").ISCSI.LUN
		name := fmt.Sprint("iqn.2026-01.test:", i)
		var sess *targettest.Session
		if i%2 == 0 { // the others log in at the moment of DELETE
			sess = targettest.MustLogin(t, addr, targettest.LoginOptions{Initiator: name}, lun)
		}
		begin, answer := make(chan struct{}), 0
		var all sync.WaitGroup
		all.Go(func() {
			<-begin
			answer = v.answers("DELETE", "/volume/vm1")
		})
		close(begin)
		if sess == nil {
			sess, err = targettest.Login(addr, targettest.LoginOptions{Initiator: name})
			require.NoError(t, err)
		}
		read := rig.Do(t, sess, targettest.Read10(lun, 0, 1))
		for read.Sense.Key == 6 { // unit attentions
			read = rig.Do(t, sess, targettest.Read10(lun, 0, 1))
		}
		all.Wait()
		if read.Good() {
			kept++
			require.Equal(t, http.StatusConflict, answer, "round %d", i)
			e := v.refusal(http.StatusConflict, "DELETE", "/volume/vm1", "")
			require.Equal(t, []string{name}, e.Users)
			require.True(t, rig.Do(t, sess, targettest.Write10(lun, 0, make([]byte, 512))).Good())
			require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/vm1?force=true"))
		} else {
			require.Equal(t, "05/25/00", read.Failed(), "round %d", i)
			require.Equal(t, http.StatusNoContent, answer, "round %d", i)
		}
		rig.Logout(t, sess)
	}
	t.Logf("%d of %d volumes stayed", kept, rounds)
}
