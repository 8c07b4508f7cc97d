package nbd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestGenerationsOfClients has the clients of each generation read, write, zero, discard and flush,
// by iSCSI, by NBD, and by NBD through a relay. What one protocol has written, the other reads.
func TestGenerationsOfClients(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI, "nbdcopy", "nbdinfo", "iscsi-ls")
	served := func() (d *rig.Daemon, uri string) {
		socket := filepath.Join(t.TempDir(), "nbd.sock")
		d = rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 64<<20),
			Args: []string{"--nbd=unix:" + socket}})
		return d, "nbd+unix:///disk.raw?socket=" + socket
	}
	server, uri := served()
	behind, uriBehind := served()
	socket := filepath.Join(t.TempDir(), "relay.sock")
	relay := rig.Start(t, rig.Config{DiskDir: t.TempDir(),
		Args: []string{"--disk=" + uriBehind, "--nbd=unix:" + socket}})
	require.Contains(t, rig.OK(t, "iscsi-ls", "-s", server.PortalURL()), "Lun:1")
	use(t, server, server.URL(1), uri)
	use(t, server, uri, server.URL(1))
	copies(t, uri)
	between := "nbd+unix:///disk.raw?socket=" + socket
	use(t, relay, between, between)
	copies(t, between)
	for _, d := range []*rig.Daemon{relay, behind, server} {
		d.Stop()
		require.NotContains(t, d.Output(), "protocol_error")
	}
}

// use fills a disk of 64 MiB, compares it as somebody else reads it, and has QEMU do each kind of
// request.
func use(t *testing.T, d *rig.Daemon, disk, read string) {
	t.Helper()
	source := randomFile(t, filepath.Join(t.TempDir(), "source"), 64<<20)
	rig.OK(t, "qemu-img", "convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw",
		source, disk)
	d.UntilFree()
	rig.Same(t, source, read)
	d.UntilFree()
	args := []string{"-f", "raw", "-t", "writeback"}
	for _, command := range []string{"write -P 7 5k 130k", "write -f -P 8 1M 512", "write -z 2M 1M",
		"discard 8M 4M", "aio_write -P 9 16M 3M", "aio_write -P 10 20M 3M", "aio_flush", "flush",
		"read -P 7 5k 130k", "read -P 8 1M 512", "read -P 0 2M 1M", "read -P 9 16M 3M",
		"read -P 10 20M 3M"} {
		args = append(args, "-c", command)
	}
	require.NotContains(t, rig.OK(t, "qemu-io", append(args, disk)...), "failed", disk)
}

// copies has libnbd's programs read and fill a disk.
func copies(t *testing.T, disk string) {
	t.Helper()
	source := randomFile(t, filepath.Join(t.TempDir(), "source"), 64<<20)
	copied := filepath.Join(t.TempDir(), "copied")
	require.NoError(t, os.WriteFile(copied, nil, 0o600))
	require.NoError(t, os.Truncate(copied, 64<<20))
	rig.OK(t, "nbdcopy", disk, copied)
	rig.Same(t, copied, disk)
	rig.OK(t, "nbdcopy", "--flush", source, disk)
	rig.Same(t, source, disk)
	require.Contains(t, rig.OK(t, "nbdinfo", "--map", disk), "67108864")
}
