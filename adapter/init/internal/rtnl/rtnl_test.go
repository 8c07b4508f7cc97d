package rtnl

import (
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// router is a message of the kernel about a router's options.
func router(options ...byte) []byte {
	b := make([]byte, unix.SizeofNlMsghdr+userOption)
	order.PutUint16(b[4:], unix.RTM_NEWNDUSEROPT)
	body := b[unix.SizeofNlMsghdr:]
	body[0] = unix.AF_INET6
	order.PutUint16(body[2:], uint16(len(options)))
	order.PutUint32(body[4:], 2)
	b = append(b, options...)
	order.PutUint32(b, uint32(len(b)))
	return b
}

func TestRouterOptions(t *testing.T) {
	server := netip.MustParseAddr("fec0::3")
	options := append([]byte{optDNS, 3, 0, 0, 0, 0, 0, 9}, server.AsSlice()...)
	options = append(options, optSearch, 2, 0, 0, 0, 0, 0, 9, 2, 'a', 'b', 0, 0, 0, 0, 0)
	dns := Event{Index: 2, DNS: []netip.Addr{server}, Lifetime: 9 * time.Second}
	search := Event{Index: 2, Search: []string{"ab"}, Lifetime: 9 * time.Second}
	require.Equal(t, []Event{dns, search}, events(router(options...)))
	options[7], dns.Lifetime = 0, 0
	require.Equal(t, []Event{dns, search}, events(router(options...)))
}

func FuzzEvents(f *testing.F) {
	f.Add(router(optDNS, 3, 0, 0, 0, 0, 0, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8))
	f.Add(router(optSearch, 2, 0, 0, 0, 0, 0, 9, 2, 'a', 'b', 0, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, e := range events(b) {
			require.True(t, e.Address.IsValid() || len(e.DNS) > 0 || len(e.Search) > 0)
			for _, name := range e.Search {
				require.False(t, strings.ContainsAny(name, " \n"))
			}
		}
	})
}

// TestKernel sets up an interface in a network of its own, and reads the kernel's state back.
func TestKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a network namespace")
	}
	// The thread is not used again: it has another network.
	runtime.LockOSThread()
	require.NoError(t, unix.Unshare(unix.CLONE_NEWNET))
	watch := testtool.Must(Dial(unix.RTNLGRP_IPV6_IFADDR))(t)
	defer watch.Close()
	c := testtool.Must(Dial())(t)
	defer c.Close()
	const lo = 1
	require.NoError(t, c.Up(lo, 1400))
	p := netip.MustParsePrefix("192.0.2.5/24")
	require.NoError(t, c.AddAddress(lo, p))
	require.NoError(t, c.AddAddress(lo, p), "again")
	require.NoError(t, c.AddRoute(Route{Index: lo, To: netip.MustParsePrefix("0.0.0.0/0"),
		Via: netip.MustParseAddr("169.254.1.1"), Source: p.Addr(), Metric: 100}))
	routes := read(t, "/proc/thread-self/net/route")
	require.Contains(t, routes, "lo\t00000000\t0101FEA9\t0003\t0\t0\t100\t00000000")
	require.NoError(t, c.RemoveAddress(lo, p))
	require.NotContains(t, read(t, "/proc/thread-self/net/route"), "0101FEA9")
	require.ErrorIs(t, c.RemoveAddress(lo, p), unix.EADDRNOTAVAIL)

	six := netip.MustParsePrefix("2001:db8::5/128")
	require.NoError(t, c.AddAddress(lo, six))
	for {
		list := testtool.Must(watch.Receive())(t)
		if len(list) > 0 {
			require.Equal(t, Event{Index: lo, Address: six.Addr()}, list[0])
			break
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	return string(testtool.Must(os.ReadFile(name))(t))
}
