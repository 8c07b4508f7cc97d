package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
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
		require.Error(t, testtool.Err2(parsePortal(text, defaultPort)), text)
	}
}
