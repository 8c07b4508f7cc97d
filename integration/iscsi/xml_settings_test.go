package iscsi

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/status"
)

// TestXMLKeepsReadOnlyAndSerial: the original wrapper dropped readonly and serial, which the user
// had set on the disk, from the XML. Here both come from the daemon that serves the disk, or from
// the flags.
func TestXMLKeepsReadOnlyAndSerial(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	path, err := rig.Binary()
	require.NoError(t, err)
	dir := rig.DiskDir(t, 1<<20)
	settings := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(settings,
		[]byte("disks: {disk.raw: {serial: of-the-user, read-only: true}}\n"), 0o644))
	d := rig.Start(t, configOf(dir, settings, ""))
	var page status.Status
	require.NoError(t, json.Unmarshal([]byte(d.Get("/status")), &page))
	require.Equal(t, "of-the-user", page.LUNs[0].Serial)
	for name, args := range map[string][]string{
		"of the daemon": {"--status-url", "http://" + d.Metrics},
		"of the flags": {"--host", "10.0.0.1", "--lun", "1", "--serial", "of-the-user",
			"--read-only"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(path, append([]string{"xml", "--target-dev", "sda"}, args...)...)
			cmd.Env = rig.ClientEnv()
			var said strings.Builder
			cmd.Stderr = &said
			out, err := cmd.Output()
			require.NoError(t, err, said.String())
			var disk libvirtxml.DomainDisk
			require.NoError(t, disk.Unmarshal(string(out)))
			require.NotNil(t, disk.ReadOnly)
			require.Equal(t, "of-the-user", disk.Serial)
		})
	}
}
