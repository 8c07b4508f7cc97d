package target

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestPortals checks which portals are listed for an initiator: for those on other hosts, no
// addresses that only this host can reach.
func TestPortals(t *testing.T) {
	portals := []net.Addr{&net.UnixAddr{Name: "/run/portal"}}
	for _, a := range []string{"127.0.0.1:3260", "127.0.0.2:3260", "192.0.2.7:3260",
		"192.0.2.7:3261", "[2001:db8::7]:3260", "0.0.0.0:3262", "[::]:3262"} {
		portals = append(portals, testtool.Must(net.ResolveTCPAddr("tcp", a))(t))
	}
	for here, want := range map[string][]string{
		"127.0.0.1:3260": {"127.0.0.1:3260", "127.0.0.2:3260"},
		"192.0.2.7:3261": {"192.0.2.7:3261", "192.0.2.7:3260", "[2001:db8::7]:3260"},
		"[fe80::1%eth0]:3262": {"[fe80::1]:3262", "192.0.2.7:3260", "192.0.2.7:3261",
			"[2001:db8::7]:3260"},
		"[::ffff:127.0.0.1]:99": {"127.0.0.1:99", "127.0.0.1:3260", "127.0.0.2:3260"},
	} {
		local := testtool.Must(net.ResolveTCPAddr("tcp", here))(t)
		require.Equal(t, want, portalsBeside(local, portals), "from %s", here)
	}
}
