package iscsi

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// TestOutOfDescriptors: a flood of connections takes every descriptor that the daemon may have.
// Established I/O continues, logins work during the flood, and nothing needs a restart afterwards.
func TestOutOfDescriptors(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20)})
	s := rig.LoginTo(t, d, "iqn.2026-01.test:established")
	want := rig.Block(7, 0x3c)
	require.True(t, rig.Do(t, s, targettest.Write10(1, 7, want)).Good())

	open := testtool.Must(os.ReadDir("/proc/" + strconv.Itoa(d.PID()) + "/fd"))(t)
	few := unix.Rlimit{Cur: uint64(len(open) + 20), Max: uint64(len(open) + 20)}
	require.NoError(t, unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, &few, nil))
	for i := range 200 {
		nc := testtool.Must(net.Dial("tcp", d.Portals[0]))(t)
		defer nc.Close()
		if i%20 != 19 {
			continue
		}
		require.Equal(t, want, rig.Do(t, s, rig.ReadBlock(1, 7)).Data)
		addr := testtool.Must(net.ResolveTCPAddr("tcp", d.Portals[0]))(t)
		other := testtool.Must(targettest.Login(addr,
			targettest.LoginOptions{Initiator: "iqn.2026-01.test:late", Discovery: true}))(t)
		rig.Logout(t, other)
	}
	d.Until("the log mentions it", func() bool {
		return strings.Contains(d.Output(), "cannot accept a connection")
	})
	require.True(t, rig.Do(t, s, rig.ReadBlock(1, 7)).Good())
}
