package guestinit

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

func TestNetworkFiles(t *testing.T) {
	n := newNetwork(t.TempDir(), "", nil)
	require.Equal(t, map[string]string{"resolv.conf": "", "hostname": "localhost\n",
		"hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"}, n.files())

	n.hostname, n.address = "web.example.org", net.ParseIP("10.0.2.15")
	server := net.ParseIP("10.0.2.3")
	n.names["eth0 IPv4"] = newResolver("eth0", []net.IP{server, server}, []string{"a", "b"})
	n.names["eth0 IPv6"] = newResolver("eth0", []net.IP{net.ParseIP("fe80::3")},
		[]string{"b", "c"})
	files := n.files()
	require.Equal(t, "search a b c\nnameserver 10.0.2.3\nnameserver fe80::3%eth0\n",
		files["resolv.conf"])
	require.Contains(t, files["hosts"], "\n10.0.2.15\tweb.example.org web\n")
	require.Equal(t, "web.example.org\n", files["hostname"])
}

// TestProgramsKeepTheirFiles: a lease that is renewed and a router that repeats itself change
// nothing. What is new changes a file that is as it was written.
func TestProgramsKeepTheirFiles(t *testing.T) {
	dir := t.TempDir()
	n := newNetwork(dir, "web", func(string, ...any) {}) // it has no card to give up an address of
	var named []string
	n.setHostname = func(name string) error {
		named = append(named, name)
		return nil
	}
	read := func(name string) string {
		return string(testtool.Must(os.ReadFile(filepath.Join(dir, name)))(t))
	}
	change := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	addr := net.ParseIP
	lease := func(server string) {
		n.resolve("eth0 IPv4", newResolver("eth0", []net.IP{addr(server)}, nil))
		n.reachable(addr("10.0.2.15"))
	}
	now := time.Unix(1e9, 0)
	routers := func(lifetime time.Duration) {
		n.hear("eth0", event{dns: []net.IP{addr("fec0::3")}, lifetime: lifetime}, now)
		n.hear("eth0", event{search: []string{"example.org"}, lifetime: lifetime}, now)
		n.reachable(addr("fec0::15"))
	}
	n.write()
	lease("10.0.2.3")
	routers(time.Minute)
	const ours = "search example.org\nnameserver 10.0.2.3\nnameserver fec0::3\n"
	require.Equal(t, ours, read("resolv.conf"))

	lease("10.0.2.4")
	routers(0)
	n.reachable(addr("10.1.0.15")) // another card
	require.Equal(t, "nameserver 10.0.2.4\n", read("resolv.conf"))
	require.Contains(t, read("hosts"), "10.0.2.15\tweb\n")
	n.drop(testCard, message())
	n.reachable(addr("10.0.2.16"))
	require.Contains(t, read("hosts"), "10.0.2.16\tweb\n")

	const mine = "nameserver 10.0.2.4\noptions ndots:2\n"
	change("resolv.conf", mine)
	change("hostname", "web # mine\n")
	lease("10.0.2.5")
	require.Equal(t, mine, read("resolv.conf"))
	require.Equal(t, []string{"web"}, named)

	// The program has also named the machine: this test's machine has another name than "web".
	n.mu.Lock()
	n.hostname = "by-dhcp"
	n.mu.Unlock()
	n.write()
	require.Equal(t, []string{"web"}, named)
	require.Equal(t, "web # mine\n", read("hostname"))
}

// TestBadHostname: a name that Linux or /etc/hosts cannot have is not used, and costs the machine
// nothing else.
func TestBadHostname(t *testing.T) {
	for _, name := range []string{strings.Repeat("x", 65), "a b", "a\n1.2.3.4 b"} {
		var said []string
		n := newNetwork(t.TempDir(), name, func(format string, args ...any) {
			said = append(said, fmt.Sprintf(format, args...))
		})
		n.setHostname = func(name string) error {
			require.Equal(t, unnamed, name)
			return unix.EINVAL // in a container without the right to
		}
		n.rename(name)
		n.resolve("eth0 IPv4", resolver{servers: []string{"10.0.2.3"}})
		require.FileExists(t, filepath.Join(n.dir, "hosts"))
		text := testtool.Must(os.ReadFile(filepath.Join(n.dir, "resolv.conf")))(t)
		require.Equal(t, "nameserver 10.0.2.3\n", string(text))
		require.Equal(t, fmt.Sprintf("%q cannot be the name of a machine", name), said[0])
	}
}

func TestRouterRecommendations(t *testing.T) {
	now := time.Unix(1e9, 0)
	list := refresh(nil, []string{"a", "b"}, now, time.Minute)
	list = refresh(list, []string{"c", "b"}, now.Add(30*time.Second), time.Minute)
	require.Equal(t, []string{"a", "b", "c"}, texts(list))
	list = refresh(list, nil, now.Add(time.Minute), 0)
	require.Equal(t, []string{"b", "c"}, texts(list), "a has expired")
	require.Equal(t, []string{"b"}, texts(refresh(list, []string{"c"}, now, 0)))
	many := strings.Split(strings.Repeat("x ", 99)+"y", " ")
	for i := range many {
		many[i] += strconv.Itoa(i)
	}
	require.Len(t, refresh(nil, many, now, time.Minute), maxRecommended)
}

// TestConfigure applies two leases in a network of its own, and reads the kernel's state back.
func TestConfigure(t *testing.T) {
	testtool.Needs(t, "root (to make a network namespace)", os.Geteuid() == 0)
	// The thread is not used again: it has another network.
	runtime.LockOSThread()
	require.NoError(t, unix.Unshare(unix.CLONE_NEWNET))
	cards := testtool.Must(ethernetCards())(t)
	require.Empty(t, cards)
	kernel := testtool.Must(nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV6_IFADDR))(t)
	defer kernel.Close()
	lo := testtool.Must(netlink.LinkByName("lo"))(t)

	n := newNetwork(t.TempDir(), "", t.Logf)
	n.setHostname = func(string) error { return nil }
	first := message(dhcpv4.OptSubnetMask(net.CIDRMask(24, 32)), dhcpv4.OptHostName("web"),
		dhcpv4.OptRouter(net.IPv4(169, 254, 1, 1)), raw(dhcpv4.OptionInterfaceMTU, 5, 0x78))
	routes := func() string {
		return string(testtool.Must(os.ReadFile("/proc/thread-self/net/route"))(t))
	}
	for range 2 {
		require.NoError(t, n.configure(lo, first, nil))
		require.Contains(t, routes(), "lo\t00000000\t0101FEA9\t0003\t0\t0\t101\t00000000")
	}
	require.Equal(t, "web", n.hostname)
	require.Equal(t, 1400, testtool.Must(netlink.LinkByName("lo"))(t).Attrs().MTU)

	second := message(dhcpv4.OptHostName(strings.Repeat("x", 65)),
		raw(dhcpv4.OptionClasslessStaticRoute, 32, 169, 254, 1, 2, 0, 0, 0, 0,
			8, 9, 192, 0, 2, 5, // its own address: Linux refuses that
			0, 169, 254, 1, 2))
	second.YourIPAddr = net.IPv4(192, 0, 2, 5)
	require.NoError(t, n.configure(lo, second, first))
	require.Equal(t, "192.0.2.5", n.address.String())
	require.Equal(t, "web", n.hostname)
	require.NotContains(t, routes(), "0101FEA9")
	require.Contains(t, routes(), "lo\t0201FEA9\t00000000\t0005\t0\t0\t101\tFFFFFFFF")
	require.Contains(t, routes(), "lo\t00000000\t0201FEA9\t0003\t0\t0\t101\t00000000")

	six := netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP("2001:db8::5"),
		Mask: net.CIDRMask(128, 128)}}
	require.NoError(t, netlink.AddrReplace(lo, &six))
	for {
		messages, _ := testtool.Must2(kernel.Receive())(t)
		if list := eventsOf(messages[0]); len(list) > 0 {
			require.Equal(t, []event{{card: lo.Attrs().Index, address: six.IP}}, list)
			break
		}
	}
}

// TestNetworkFile: what is no file in the image is not mounted over. If /etc/hosts is a link to
// /dev/null, that device must stay what it is; and opening a FIFO must not stop the start.
func TestNetworkFile(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.Symlink("/dev/null", in("null")))
	require.NoError(t, os.Symlink("null", in("again")))
	require.NoError(t, os.Symlink("loop", in("loop")))
	require.NoError(t, os.Symlink("run/missing", in("missing")))
	require.NoError(t, os.Mkdir(in("directory"), 0o755))
	require.NoError(t, unix.Mkfifo(in("fifo"), 0o600))
	for _, name := range []string{"null", "again", "loop", "directory", "fifo"} {
		_, err := networkFile(in(name))
		require.ErrorContains(t, err, in(name)+" of the image stays as it is", name)
	}
	at := testtool.Must(networkFile(in("missing")))(t)
	require.Equal(t, in("run/missing"), at)
	require.FileExists(t, at)
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
