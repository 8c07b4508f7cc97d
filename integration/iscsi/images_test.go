package iscsi

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestBlockDevicesAndLinks: a person names a logical volume by its link. It is read, written in
// place, and overwritten by convert, and a header that a guest has written on it is not believed.
func TestBlockDevicesAndLinks(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI, "losetup")
	rig.NeedRoot(t)
	dir := t.TempDir()
	image, volume := filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "volume")
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", image, "8M")
	rig.OK(t, "qemu-io", "-c", "write -P 7 1M 1M", image)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("old "), 4<<20), 0o600))
	device := strings.TrimSpace(rig.OK(t, "losetup", "--find", "--show", file))
	t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "--detach", device).Run()) })
	require.NoError(t, os.Symlink(device, volume))
	link := filepath.Join(dir, "link.qcow2")
	require.NoError(t, os.Symlink("a.qcow2", link))

	rig.MustRun(t, nil, "convert", link, volume)
	rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 7 1M 1M", "-c", "read -P 0 0 1M", file)
	got, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "old old ", string(got[8<<20:8<<20+8]), "what is behind the disk stays")
	r := rig.Run(t, nil, "convert", volume, device)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "is the image itself")
	r = rig.Run(t, nil, "convert", "--target-format=qcow2", link, volume)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "takes a raw disk")

	serve := func(args ...string) *rig.Daemon {
		return rig.Start(t, rig.Config{Args: append([]string{"--copy-mode=none"}, args...)})
	}
	d := serve(volume)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "read -P 7 1M 1M", "-c", "write -P 9 4M 64k",
		"-c", "write -z 1M 512k", "-c", "discard 2M 1M", "-c", "flush", d.URL(1))
	r = rig.Run(t, nil, "serve", "--copy-mode=none", "--listen=127.0.0.1:0",
		"--metrics-listen=", device)
	require.NotZero(t, r.Status, "two daemons must not write to one device")
	require.Contains(t, r.Output, "is in use")
	d.Stop()
	rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 9 4M 64k", "-c", "read -P 0 1M 512k",
		"-c", "read -P 7 1536k 512k", file)

	// A guest writes the header of an image that names another file of the host.
	header := filepath.Join(dir, "header.qcow2")
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", header)
	evil, err := os.ReadFile(header)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(device, evil, 0))
	require.Contains(t, rig.MustRun(t, nil, "inspect", volume).Output, "raw")
}
