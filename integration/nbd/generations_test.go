package nbd

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// A generation of clients is what one release of Debian has. A peer's version that nobody ran may
// be the one that people have: QEMU from 8.2 on speaks NBD otherwise than QEMU 7.2.
type generation struct {
	name string
	// bin has the programs; "": those that are installed are taken.
	bin string
}

// client is the program of a generation.
func (g generation) client(name string) string { return filepath.Join(g.bin, name) }

// inGenerations runs a test with the clients that are installed, and with those of a later Debian,
// which scripts/build-clients.sh unpacks.
func inGenerations(t *testing.T, tools []string, test func(t *testing.T, g generation)) {
	t.Helper()
	t.Run("installed", func(t *testing.T) {
		t.Parallel()
		rig.Need(t, tools...)
		test(t, generation{name: "installed"})
	})
	t.Run("later", func(t *testing.T) {
		t.Parallel()
		rig.Need(t)
		test(t, generation{name: "later", bin: laterClients(t)})
	})
}

// laterClients is the directory of the programs of a later Debian.
func laterClients(t *testing.T) string {
	t.Helper()
	const script = "scripts/build-clients.sh"
	text, err := os.ReadFile(filepath.Join("..", "..", script))
	require.NoError(t, err)
	sum := sha256.Sum256(text)
	dir, err := filepath.Abs(filepath.Join(cmp.Or(os.Getenv("KUBEVIRT_DISK_CLIENTS"),
		filepath.Join("..", "..", "cache", "clients")), hex.EncodeToString(sum[:8])))
	require.NoError(t, err)
	testtool.Built(t, script, dir, "bin")
	return filepath.Join(dir, "bin")
}

// TestGenerationsOfClients has the clients of each generation read, write, zero, discard and flush,
// by iSCSI, by NBD, and by NBD through a relay. What one protocol has written, the other reads.
func TestGenerationsOfClients(t *testing.T) {
	t.Parallel()
	tools := []string{"qemu-img", "qemu-io", rig.QEMUISCSI, "nbdcopy", "nbdinfo", "iscsi-ls"}
	inGenerations(t, tools, func(t *testing.T, g generation) {
		served := func() (d *rig.Daemon, uri string) {
			socket := filepath.Join(t.TempDir(), "nbd.sock")
			d = rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 64<<20),
				Args: []string{"--nbd=unix:" + socket}})
			return d, "nbd+unix:///disk.raw?socket=" + socket
		}
		server, uri := served()
		behind, uriBehind := served()
		socket := filepath.Join(t.TempDir(), "relay.sock")
		relay := rig.Start(t, rig.Config{DiskDir: filepath.Join(t.TempDir(), "none"),
			Args: []string{"--disk=" + uriBehind, "--nbd=unix:" + socket}})
		require.Contains(t, rig.OK(t, g.client("iscsi-ls"), "-s", server.PortalURL()), "Lun:1")
		g.use(t, server, server.URL(1), uri)
		g.use(t, server, uri, server.URL(1))
		g.copies(t, uri)
		between := "nbd+unix:///disk.raw?socket=" + socket
		g.use(t, relay, between, between)
		g.copies(t, between)
		for _, d := range []*rig.Daemon{relay, behind, server} {
			d.Stop()
			require.NotContains(t, d.Output(), "protocol_error", g.name)
		}
	})
}

// use fills a disk of 64 MiB, compares it as somebody else reads it, and has QEMU do each kind of
// request.
func (g generation) use(t *testing.T, d *rig.Daemon, disk, read string) {
	t.Helper()
	source := randomFile(t, filepath.Join(t.TempDir(), "source"), 64<<20)
	rig.OK(t, g.client("qemu-img"), "convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw",
		source, disk)
	d.UntilFree()
	g.same(t, source, read)
	d.UntilFree()
	args := []string{"-f", "raw", "-t", "writeback"}
	for _, command := range []string{"write -P 7 5k 130k", "write -f -P 8 1M 512", "write -z 2M 1M",
		"discard 8M 4M", "aio_write -P 9 16M 3M", "aio_write -P 10 20M 3M", "aio_flush", "flush",
		"read -P 7 5k 130k", "read -P 8 1M 512", "read -P 0 2M 1M", "read -P 9 16M 3M",
		"read -P 10 20M 3M"} {
		args = append(args, "-c", command)
	}
	require.NotContains(t, rig.OK(t, g.client("qemu-io"), append(args, disk)...), "failed", disk)
}

// copies has libnbd's programs read and fill a disk.
func (g generation) copies(t *testing.T, disk string) {
	t.Helper()
	source := randomFile(t, filepath.Join(t.TempDir(), "source"), 64<<20)
	copied := filepath.Join(t.TempDir(), "copied")
	require.NoError(t, os.WriteFile(copied, nil, 0o600))
	require.NoError(t, os.Truncate(copied, 64<<20))
	rig.OK(t, g.client("nbdcopy"), disk, copied)
	g.same(t, copied, disk)
	rig.OK(t, g.client("nbdcopy"), "--flush", source, disk)
	g.same(t, source, disk)
	require.Contains(t, rig.OK(t, g.client("nbdinfo"), "--map", disk), "67108864")
}

// same compares two raw disks.
func (g generation) same(t *testing.T, a, b string) {
	t.Helper()
	rig.OK(t, g.client("qemu-img"), "compare", "-f", "raw", "-F", "raw", a, b)
}
