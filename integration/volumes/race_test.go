package volumes

import (
	"fmt"
	"net"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/target/targettest"
)

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
