package pages

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPortalFor(t *testing.T) {
	for _, c := range []struct {
		portal, asked, local, want string
	}{
		{"10.0.0.1:3260", "example.com:9260", "10.9.9.9:9260", "10.0.0.1:3260"},
		{"0.0.0.0:3260", "example.com:9260", "10.9.9.9:9260", "example.com:3260"},
		{"[::]:3260", "[fd00::1]:9260", "10.9.9.9:9260", "[fd00::1]:3260"},
		{"[::]:3260", "[fd00::1]", "10.9.9.9:9260", "[fd00::1]:3260"},
		{"[::]:3261", "example.com", "10.9.9.9:9260", "example.com:3261"},
		{"0.0.0.0:3260", "a b; rm -rf:9260", "10.9.9.9:9260", "10.9.9.9:3260"},
		{"0.0.0.0:3260", "-oProxy:9260", "10.9.9.9:9260", "10.9.9.9:3260"},
		{"0.0.0.0:3260", "$(reboot)", "", "HOST:3260"},
	} {
		require.Equal(t, c.want, portalFor([]string{c.portal}, c.asked, c.local), "%+v", c)
	}
	require.Equal(t, "HOST:3260", portalFor(nil, "x", ""), "there is none yet")
}

func TestCommands(t *testing.T) {
	c := commandsFor("[fd00::1]:3260", "iqn.x", 300, true, true, true)
	require.Contains(t, c.QEMU, "portal=[fd00::1]:3260,")
	require.Contains(t, c.QEMU, "lun=16684,", "as QEMU counts")
	require.Contains(t, c.QEMU, "password-secret=chap,read-only=on")
	require.Contains(t, c.Iscsiadm, "password_in")
	require.Contains(t, c.Libvirt, "<host name='fd00::1' port='3260'/>")
	require.Contains(t, c.Libvirt, "name='iqn.x/16684'")
	for _, chap := range []bool{true, false} {
		c := commandsFor("h:1", "iqn.a&b'", 1, chap, false, !chap)
		var any struct {
			XMLName xml.Name
		}
		require.NoError(t, xml.Unmarshal([]byte(c.Libvirt), &any))
		require.Equal(t, chap, strings.Contains(c.QEMU+c.Libvirt+c.Iscsiadm, "USER"))
		require.NotContains(t, c.Iscsiadm, "password_in")
	}
}
