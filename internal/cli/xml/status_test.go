package xml

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

func TestStatusPage(t *testing.T) {
	for text, want := range map[string]string{
		"http://10.0.0.5:9260":                   "http://10.0.0.5:9260/status",
		"http://[fd00::5]:9260/":                 "http://[fd00::5]:9260/status",
		"https://disk.example.com":               "https://disk.example.com/status",
		"https://proxy.example.com/disk1/status": "https://proxy.example.com/disk1/status",
	} {
		page, err := statusPage(text)
		require.NoError(t, err)
		require.Equal(t, want, page.String())
	}
}

// TestServedPortals: a portal is named as it is reached from where the page was asked.
func TestServedPortals(t *testing.T) {
	none := func() *settings.Loader {
		rows := []settings.Setting{{Key: settings.KeyPort}}
		flags := pflag.NewFlagSet("xml", pflag.ContinueOnError)
		settings.AddFlags(flags, rows)
		return settings.Load(osfile.ReadText, flags, rows, settings.Known{Rows: rows})
	}
	for _, c := range []struct {
		bound []string
		page  string
		want  string
	}{
		{[]string{"0.0.0.0:3260"}, "disk.example.com", "disk.example.com:3260"},
		{[]string{"[::]:3260"}, "10.0.0.5", "10.0.0.5:3260"},
		{[]string{"10.0.0.5:3260"}, "fd00::5", "10.0.0.5:3260"},
		{[]string{"[fd00::5]:3260"}, "10.0.0.5", "[fd00::5]:3260"},
		{nil, "10.0.0.5", ""},
		{[]string{"[::]:3260", "127.0.0.1:3261"}, "10.0.0.5", "10.0.0.5:3260"},
	} {
		l := none()
		got := new(Flags).servedPortals(&status.Status{Portals: c.bound}, c.page, l)
		if c.want == "" {
			require.Empty(t, got, "nobody listens there")
			require.ErrorContains(t, l.Problems.Err(), "--host is missing")
			continue
		}
		require.NoError(t, l.Problems.Err())
		require.Equal(t, c.want, got[0].String())
	}

	f := Flags{}
	l := none()
	require.Empty(t,
		f.servedPortals(&status.Status{Portals: []string{"127.0.0.1:3260", "[::1]:3260"}},
			"10.0.0.5", l))
	require.ErrorContains(t, l.Problems.Err(), "--host is missing")
	f.hosts = []string{"10.0.0.5"}
	require.Equal(t, []libvirt.Portal{{Host: "10.0.0.5", Port: 3265}},
		f.servedPortals(&status.Status{Portals: []string{"127.0.0.1:3265"}}, "10.0.0.5", l))
}

func TestNBDPortals(t *testing.T) {
	said := &status.Status{NBDPortals: []string{"unix:/s", "127.0.0.1:1", "10.0.0.5:2"}}
	var e libvirt.Export
	require.True(t, atDaemon(&e, said, "10.0.0.5"))
	require.Equal(t, libvirt.Export{Portal: libvirt.Portal{Host: "10.0.0.5", Port: 2}}, e,
		"neither a socket nor loopback is reached from elsewhere")
	require.False(t, atDaemon(&e, &status.Status{}, "localhost"))
}
