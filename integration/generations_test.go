package integration

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// A generation of clients is what one release of Debian has. A peer's version that nobody ran has
// more than once been the one that people have: QEMU from 8.2 on speaks NBD otherwise than QEMU 7.2.
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
		requireTools(t, tools...)
		test(t, generation{name: "installed"})
	})
	t.Run("later", func(t *testing.T) {
		t.Parallel()
		requireTools(t)
		test(t, generation{name: "later", bin: laterClients(t)})
	})
}

// laterClients is the directory of the programs of a later Debian.
func laterClients(t *testing.T) string {
	t.Helper()
	const script = "scripts/build-clients.sh"
	text, err := os.ReadFile(filepath.Join("..", script))
	require.NoError(t, err)
	sum := sha256.Sum256(text)
	dir, err := filepath.Abs(filepath.Join(cmp.Or(os.Getenv("KUBEVIRT_DISK_CLIENTS"),
		filepath.Join("..", "cache", "clients")), hex.EncodeToString(sum[:8])))
	require.NoError(t, err)
	testtool.Built(t, script, dir, "bin")
	return filepath.Join(dir, "bin")
}

// TestGenerationsOfClients has the clients of each generation read, write, zero, discard and flush,
// by iSCSI, by NBD, and by NBD through a relay. What one protocol has written, the other reads.
func TestGenerationsOfClients(t *testing.T) {
	t.Parallel()
	inGenerations(t, []string{"qemu-img", "qemu-io", qemuISCSI, "nbdcopy", "nbdinfo", "iscsi-ls"},
		func(t *testing.T, g generation) {
			served := func() (*daemon, string) {
				socket := filepath.Join(t.TempDir(), "nbd.sock")
				return start(t, config{diskDir: diskDir(t, 64<<20),
					args: []string{"--nbd=unix:" + socket}}), "nbd+unix:///disk.raw?socket=" + socket
			}
			server, uri := served()
			behind, uriBehind := served()
			socket := filepath.Join(t.TempDir(), "relay.sock")
			relay := start(t, config{diskDir: filepath.Join(t.TempDir(), "none"),
				args: []string{"--disk=" + uriBehind, "--nbd=unix:" + socket}})
			uris := map[string]string{"iSCSI": server.url(1), "NBD": uri,
				"relay": "nbd+unix:///disk.raw?socket=" + socket}
			require.Contains(t, ok(t, g.client("iscsi-ls"), "-s", server.portalURL()), "Lun:1")
			for name, uri := range uris {
				source := randomFile(t, filepath.Join(t.TempDir(), name), 64<<20)
				ok(t, g.client("qemu-img"), "convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw",
					source, uri)
				for reader, other := range uris {
					if (reader == "relay") != (name == "relay") {
						continue // it is another disk
					}
					r := client(t, nil, g.client("qemu-img"), "compare", "-f", "raw", "-F", "raw", source,
						other)
					require.Zero(t, r.status, "%s, read by %s: %s", name, reader, r)
				}
				args := []string{"-f", "raw", "-t", "writeback"}
				for _, command := range []string{"write -P 7 5k 130k", "write -f -P 8 1M 512",
					"write -z 2M 1M", "discard 8M 4M", "aio_write -P 9 16M 3M", "aio_write -P 10 20M 3M",
					"aio_flush", "flush", "read -P 7 5k 130k", "read -P 8 1M 512", "read -P 0 2M 1M",
					"read -P 9 16M 3M", "read -P 10 20M 3M"} {
					args = append(args, "-c", command)
				}
				out := ok(t, g.client("qemu-io"), append(args, uri)...)
				require.NotContains(t, out, "failed", "%s", name)
				if name == "iSCSI" {
					continue
				}
				copied := filepath.Join(t.TempDir(), "copied")
				require.NoError(t, os.WriteFile(copied, nil, 0o600))
				require.NoError(t, os.Truncate(copied, 64<<20))
				ok(t, g.client("nbdcopy"), uri, copied)
				ok(t, g.client("qemu-img"), "compare", "-f", "raw", "-F", "raw", copied, uri)
				ok(t, g.client("nbdcopy"), "--flush", source, uri)
				ok(t, g.client("qemu-img"), "compare", "-f", "raw", "-F", "raw", source, uri)
				require.Contains(t, ok(t, g.client("nbdinfo"), "--map", uri), "67108864")
			}
			for _, d := range []*daemon{relay, behind, server} {
				d.stop()
				require.NotContains(t, d.Output(), "protocol_error", fmt.Sprint(g))
			}
		})
}
