package guestinit

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNetworkFiles(t *testing.T) {
	n := newNetwork(t.TempDir(), "", nil)
	require.Equal(t, map[string]string{"resolv.conf": "", "hostname": "localhost\n",
		"hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"}, n.files())

	n.hostname, n.address = "web.example.org", netip.MustParseAddr("10.0.2.15")
	server := netip.MustParseAddr("10.0.2.3")
	n.names["eth0 IPv4"] = newResolver("eth0", []netip.Addr{server, server}, []string{"a", "b"})
	n.names["eth0 IPv6"] = newResolver("eth0", []netip.Addr{netip.MustParseAddr("fe80::3")},
		[]string{"b", "c"})
	files := n.files()
	require.Equal(t, "search a b c\nnameserver 10.0.2.3\nnameserver fe80::3%eth0\n",
		files["resolv.conf"])
	require.Contains(t, files["hosts"], "\n10.0.2.15\tweb.example.org web\n")
	require.Equal(t, "web.example.org\n", files["hostname"])
}

func TestCards(t *testing.T) {
	n := newNetwork(t.TempDir(), "", nil)
	n.sys = t.TempDir()
	for name, text := range map[string]string{
		"eth0/type": "1\n", "eth0/ifindex": "2\n", "eth0/address": "52:54:00:12:34:56\n",
		"lo/type": "772\n", "lo/ifindex": "1\n", "lo/address": "00:00:00:00:00:00\n",
		"bad/type": "1\n", "bad/ifindex": "3\n", "bad/address": "52:54:00:12:34\n",
	} {
		file := filepath.Join(n.sys, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	require.Equal(t, []card{{"eth0", 2, [6]byte{0x52, 0x54, 0, 0x12, 0x34, 0x56}}}, n.cards())
}

func TestFollowLinks(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "resolv.conf")
	require.NoError(t, os.Symlink("../run/stub.conf", link))
	require.Equal(t, filepath.Join(filepath.Dir(dir), "run/stub.conf"), followLinks(link))
	require.Equal(t, "/no/such", followLinks("/no/such"))
	loop := filepath.Join(dir, "loop")
	require.NoError(t, os.Symlink("loop", loop))
	require.Equal(t, loop, followLinks(loop))
}
