package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/daemon/options"
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
		require.Equal(t, want.loopback, p.Loopback(), text)
	}
	for _, text := range []string{"", "3260", "host", "host:1", "1.2.3.4:", "1.2.3.4:x",
		"1.2.3.4:-1", "1.2.3.4:65536", "[::1", "::1]:1", "[::1]:1:2", "1.2.3:1",
		"http://1.2.3.4:1"} {
		_, _, err := parsePortal(text, defaultPort)
		require.Error(t, err, text)
	}
}

func mustPortal(t *testing.T, text string) options.Address {
	t.Helper()
	p, _, err := parsePortal(text, defaultPort)
	require.NoError(t, err)
	return p
}

// TestLocal checks that a daemon on every address is asked on this machine.
func TestLocal(t *testing.T) {
	require.Equal(t, "127.0.0.1:9260", local(mustPortal(t, ":9260")).String())
	require.Equal(t, "[::1]:9260", local(mustPortal(t, "[::]:9260")).String())
	require.Equal(t, "10.0.0.1:9260", local(mustPortal(t, "10.0.0.1:9260")).String())
}

// TestPagesBesidePortals checks that portals and pages can have the same port if their addresses do
// not overlap.
func TestPagesBesidePortals(t *testing.T) {
	for portals, pages := range map[string]string{
		"127.0.0.2:4000":             "127.0.0.1:4000",
		"[::1]:4000":                 "127.0.0.1:4000",
		"127.0.0.1:4000":             "[::1]:4000",
		"[::]:4000,127.0.0.1:4000":   "127.0.0.2:4000", // [::] then leaves IPv4 alone
		"[::]:4000,127.0.0.1:4001":   "127.0.0.1:4002",
		"127.0.0.1:0,127.0.0.2:4000": ":0",
	} {
		cleanEnv(t)
		c := mustConfig(t, "--insecure-no-auth", "--listen="+portals, "--metrics-listen="+pages)
		require.Equal(t, portals, portalTexts(c))
		require.Equal(t, pages, c.Pages.String())
	}
}

// TestPortsOfOneDaemon: a port that two parts of a daemon would use is an error of the settings,
// not another process.
func TestPortsOfOneDaemon(t *testing.T) {
	const tls = " --nbd-tls-cert=/c --nbd-tls-key=/k --nbd-client-ca=/a"
	for args, want := range map[string][]string{
		"--nbd=127.0.0.1:3260": {"--nbd: 127.0.0.1:3260: the portals of iSCSI would use the port",
			"with --port"},
		"--nbd=127.0.0.2:4000 --listen=:4000 --insecure-no-auth": {"--nbd: 127.0.0.2:4000"},
		"--nbd=127.0.0.1:4000 --metrics-listen=:4000": {
			"--metrics-listen: :4000: NBD would use the port", "for NBD with --nbd"},
		"--nbd=127.0.0.1:4000 --volumes-listen=127.0.0.1:4000": {
			"--volumes-listen: 127.0.0.1:4000: NBD would"},
		"--volumes-listen=127.0.0.1:4000 --metrics-listen=127.0.0.1:4000": {
			"--volumes-listen: 127.0.0.1:4000: the pages would", "with --metrics-listen"},
		"--metrics-listen=127.0.0.1:3260":          {"--metrics-listen: 127.0.0.1:3260:"},
		"--nbd=127.0.0.1:1 --nbd=127.0.0.1:1":      {"127.0.0.1:1 is listed twice"},
		"--nbd=127.0.0.1:1 --nbd=0.0.0.0:1" + tls:  {"0.0.0.0:1 includes the other"},
		"--nbd=unix:/s --nbd=unix:/s":              {"unix:/s is listed twice"},
		"--nbd=[::]:3260 --listen=127.0.0.1" + tls: {"--nbd: [::]:3260: the portals"},
	} {
		cleanEnv(t)
		_, err := tryConfig(strings.Fields(args)...)
		require.Error(t, err, args)
		for _, part := range want {
			require.ErrorContains(t, err, part, args)
		}
	}
	for _, args := range []string{
		"--nbd=127.0.0.2:3260",
		"--nbd=127.0.0.1:0 --listen=127.0.0.1:0 --metrics-listen=127.0.0.1:0",
		"--nbd=127.0.0.1:3260 --iscsi=false",
		"--nbd=127.0.0.1:9260 --metrics-listen=",
		"--nbd=unix:/a --nbd=unix:/b --nbd=[::1]:1 --nbd=127.0.0.1:1",
	} {
		cleanEnv(t)
		_, err := tryConfig(strings.Fields(args)...)
		require.NoError(t, err, args)
	}
}
