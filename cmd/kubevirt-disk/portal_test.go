package main

import (
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParsePortal(t *testing.T) {
	for text, want := range map[string]struct {
		portal   string
		explicit bool
		loopback bool
	}{
		"0.0.0.0:3261":           {"0.0.0.0:3261", true, false},
		"0.0.0.0":                {"0.0.0.0:3260", false, false},
		"127.0.0.1:0":            {"127.0.0.1:0", true, true},
		"127.9.9.9":              {"127.9.9.9:3260", false, true},
		"[::1]:3260":             {"[::1]:3260", true, true},
		"[::1]":                  {"[::1]:3260", false, true},
		"::1":                    {"[::1]:3260", false, true},
		"[fe80::1%eth0]:3260":    {"[fe80::1%eth0]:3260", true, false},
		"[::ffff:127.0.0.1]:1":   {"127.0.0.1:1", true, true},
		"[::ffff:192.0.2.1]:1":   {"192.0.2.1:1", true, false},
		":3260":                  {":3260", true, false},
		"localhost":              {"127.0.0.1:3260", false, true},
		"localhost:1":            {"127.0.0.1:1", true, true},
		"[2001:db8::1]:65535":    {"[2001:db8::1]:65535", true, false},
		"2001:db8::3260":         {"[2001:db8::3260]:3260", false, false},
		"[2001:db8:0:0::1]:3260": {"[2001:db8::1]:3260", true, false},
	} {
		p, explicit, err := parsePortal(text, defaultPort)
		require.NoError(t, err, text)
		require.Equal(t, want.portal, p.String(), text)
		require.Equal(t, want.explicit, explicit, text)
		require.Equal(t, want.loopback, p.loopback(), text)
	}
	for _, text := range []string{"", "3260", "host", "host:1", "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:-1", "1.2.3.4:65536", "[::1", "::1]:1", "[::1]:1:2", "1.2.3:1", "http://1.2.3.4:1"} {
		_, _, err := parsePortal(text, defaultPort)
		require.Error(t, err, text)
	}
}

func TestPortalNetworks(t *testing.T) {
	parse := func(text string) (all []portal) {
		for _, s := range strings.Fields(text) {
			p, _, err := parsePortal(s, defaultPort)
			require.NoError(t, err)
			all = append(all, p)
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
			got = append(got, p.network(all))
		}
		require.Equal(t, want, strings.Join(got, " "), text)
	}
}

// TestClashes compares what is refused with what the kernel refuses.
func TestClashes(t *testing.T) {
	for text, want := range map[string]bool{
		"127.0.0.1 127.0.0.1": true, "127.0.0.1 127.0.0.2": false, "127.0.0.1 0.0.0.0": true, "0.0.0.0 :": true, "127.0.0.1 :": true,
		"127.0.0.1 [::1]": false, "0.0.0.0 [::]": false, "127.0.0.1 [::]": false, "[::1] [::]": true, "[::1] :": true, "[::] :": true,
	} {
		t.Run(text, func(t *testing.T) {
			if l, err := net.Listen("tcp6", "[::1]:0"); err == nil {
				require.NoError(t, l.Close())
			} else if strings.Contains(text, "[") {
				t.Skip("skipped: this machine has no IPv6")
			}
			one, two, _ := strings.Cut(text, " ")
			var all []portal
			bindable := false
			// Somebody else may have the port at one of the addresses: then another port shows it.
			for tries := 0; tries < 8 && !bindable; tries++ {
				free, err := net.Listen("tcp", ":0")
				require.NoError(t, err)
				port := strconv.Itoa(free.Addr().(*net.TCPAddr).Port)
				require.NoError(t, free.Close())
				all = nil
				for _, address := range []string{one, two} {
					all = append(all, mustPortal(t, strings.TrimSuffix(address, ":")+":"+port))
				}
				listeners, err := listenAll(t.Context(), all)
				closeAll(listeners)
				bindable = err == nil
			}
			require.Equal(t, want, !bindable)
			require.Equal(t, want, all[0].clashes(all[1]))
			require.Equal(t, want, all[1].clashes(all[0]))
			all[0].port = 0
			require.False(t, all[0].clashes(all[1]))
		})
	}
}

func TestListenAllBindsAllOrNone(t *testing.T) {
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	p, _, err := parsePortal(taken.Addr().String(), 0)
	require.NoError(t, err)
	_, err = listenAll(t.Context(), []portal{{addr: loopback4()}, p})
	require.ErrorContains(t, err, p.String())
	require.ErrorContains(t, err, "taken")
	require.ErrorContains(t, err, "--listen (LISTEN) or --port (PORT)")

	all, err := listenAll(t.Context(), []portal{{addr: loopback4()}, {addr: loopback4()}})
	require.NoError(t, err)
	require.Len(t, all, 2)
	closeAll(all)
	_, err = listenAll(t.Context(), []portal{{addr: mustPortal(t, "192.0.2.77:0").addr}})
	require.ErrorContains(t, err, "does not have the address")
}

func mustPortal(t *testing.T, text string) portal {
	t.Helper()
	p, _, err := parsePortal(text, defaultPort)
	require.NoError(t, err)
	return p
}

func TestReachable(t *testing.T) {
	for from, want := range map[string]string{
		"0.0.0.0:3260": "127.0.0.1:3260", "[::]:3260": "[::1]:3260", "10.0.0.1:1": "10.0.0.1:1", "[::1]:1": "[::1]:1",
	} {
		require.Equal(t, want, reachable(from))
	}
	require.Equal(t, "127.0.0.1:9260", local(mustPortal(t, ":9260")).String())
	require.Equal(t, "[::1]:9260", local(mustPortal(t, "[::]:9260")).String())
	require.Equal(t, "10.0.0.1:9260", local(mustPortal(t, "10.0.0.1:9260")).String())
}

// TestPagesBesidePortals: one port serves both where their addresses have nothing in common.
func TestPagesBesidePortals(t *testing.T) {
	for portals, pages := range map[string]string{
		"127.0.0.2:4000":             "127.0.0.1:4000",
		"[::1]:4000":                 "127.0.0.1:4000",
		"127.0.0.1:4000":             "[::1]:4000",
		"[::]:4000,127.0.0.1:4000":   "127.0.0.2:4000", // then [::] leaves IPv4 alone
		"[::]:4000,127.0.0.1:4001":   "127.0.0.1:4002",
		"127.0.0.1:0,127.0.0.2:4000": ":0",
	} {
		cleanEnv(t)
		c := mustConfig(t, "--insecure-no-auth", "--listen="+portals, "--metrics-listen="+pages)
		require.Equal(t, portals, portalTexts(c))
		require.Equal(t, pages, c.metricsListen.String())
	}
}
