package pages

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
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
	page := &status.Status{TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Authentication: "mutual-chap"}
	lun := &status.LUN{LUN: 300, ReadOnly: true, AccessMode: "write-exclusive",
		Serial: "8e3612c20573c2f4e048"}
	c := commandsFor("[fd00::1]:3260", page, lun)
	require.Contains(t, c.QEMU, "portal=[fd00::1]:3260,")
	require.Contains(t, c.QEMU, "lun=16684,", "as QEMU counts")
	require.Contains(t, c.QEMU, "password-secret=chap,read-only=on")
	for line := range strings.SplitSeq(c.Iscsiadm, "\n") {
		if strings.HasPrefix(line, "iscsiadm") {
			require.NotContains(t, strings.ToLower(line), "password", "others could see it")
		}
	}
	require.Contains(t, c.Iscsiadm, "password_in = ")
	for _, auth := range []string{"chap", "none"} {
		page.Authentication = auth
		c := commandsFor("[fd00::1]:3260", page, lun)
		require.Equal(t, auth == "chap", strings.Contains(c.QEMU+c.Libvirt+c.Iscsiadm, "USER"))
		require.NotContains(t, c.Iscsiadm, "password_in")

		// What the library reads back is the LUN, with nothing lost.
		back, device := testtool.Must2(libvirt.ParseDisk(c.Libvirt))(t)
		require.Equal(t, 300, back.Number)
		require.Equal(t, page.TargetName, back.TargetName)
		require.Equal(t, []libvirt.Portal{{Host: "fd00::1", Port: 3260}}, back.Portals)
		require.Equal(t, lun.Serial, back.Serial)
		require.True(t, back.ReadOnly)
		require.Equal(t, initiator, device.Initiator)
		require.Equal(t, auth == "chap", back.Credential.SecretUsage == page.TargetName)
	}
	require.Contains(t, commandsFor("HOST:3260", page, lun).Libvirt, `<host name="HOST"`)
}
