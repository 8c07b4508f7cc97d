package daemon

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
)

func TestPortalNetworks(t *testing.T) {
	parse := func(text string) (all []options.Address) {
		for _, s := range strings.Fields(text) {
			all = append(all, mustAddress(t, s))
		}
		return all
	}
	for text, want := range map[string]string{
		"0.0.0.0":                  "tcp4",
		"[::]":                     "tcp", // IPv4 too
		"0.0.0.0 [::]":             "tcp4 tcp6",
		"0.0.0.0:1 [::]:2":         "tcp4 tcp",
		":3260":                    "tcp",
		"127.0.0.1 [::1]":          "tcp4 tcp6",
		"192.0.2.1:5 [::]:5 [::1]": "tcp4 tcp6 tcp6",
	} {
		all := parse(text)
		var got []string
		for _, p := range all {
			got = append(got, p.Network(all))
		}
		require.Equal(t, want, strings.Join(got, " "), text)
	}
}

func TestListenAllBindsAllOrNone(t *testing.T) {
	taken := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer taken.Close()
	p := mustAddress(t, taken.Addr().String())
	opt := options.Options{Table: optionstest.Table}
	by := opt.SettingsOf(&opt.Portals)
	_, err := listenAll(t.Context(), []options.Address{loopback(), p}, by)
	require.ErrorContains(t, err, p.String())
	require.ErrorContains(t, err, "taken")
	require.ErrorContains(t, err, "--listen (LISTEN) or --port (PORT)")

	all := testtool.Must(listenAll(t.Context(), []options.Address{loopback(), loopback()}, nil))(t)
	require.Len(t, all, 2)
	closeAll(all)
	_, err = listenAll(t.Context(), []options.Address{mustAddress(t, "192.0.2.77:0")}, by)
	require.ErrorContains(t, err, "does not have the address")
}

// mustAddress parses an address. Without a port it gets port 3260.
func mustAddress(t *testing.T, text string) options.Address {
	t.Helper()
	if addr, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return options.Address{Addr: addr, Port: 3260}
	}
	host, port := testtool.Must2(net.SplitHostPort(text))(t)
	n := testtool.Must(strconv.ParseUint(port, 10, 16))(t)
	if host == "" {
		return options.Address{Port: uint16(n)}
	}
	addr := testtool.Must(netip.ParseAddr(host))(t)
	return options.Address{Addr: addr, Port: uint16(n)}
}

func TestReachable(t *testing.T) {
	for from, want := range map[string]string{
		"0.0.0.0:3260": "127.0.0.1:3260", "[::]:3260": "[::1]:3260", "10.0.0.1:1": "10.0.0.1:1",
		"[::1]:1": "[::1]:1", ":9260": "127.0.0.1:9260",
	} {
		require.Equal(t, want, options.Reachable(from))
	}
}
