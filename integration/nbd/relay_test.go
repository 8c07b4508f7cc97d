package nbd

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestRelay has a daemon hand on the disk of another one, by TLS and with certificates, to clients
// that have none. The server is killed again and again while they write: no client sees an error,
// and what was written is there.
func TestRelay(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", "nbdcopy")
	dir, state, images := t.TempDir(), t.TempDir(), rig.DiskDir(t, 64<<20)
	rig.MakeCertificate(t, filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"))
	cert, key := rig.MakeClientCertificate(t, dir, "relay.example")
	port := rig.FreePort(t)
	ca := filepath.Join(dir, "server.crt")
	served := rig.Config{DiskDir: images, StateDir: state, Args: []string{
		"--persistent-dir=" + rig.NewVolume(t, state), "--nbd=127.0.0.1:" + port,
		"--nbd-tls-cert=" + ca, "--nbd-tls-key=" + filepath.Join(dir, "server.key"),
		"--nbd-client-ca=" + ca}}
	server := rig.Start(t, served)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	disk := "--disk=nbds://127.0.0.1:" + port + "/disk.raw"
	relay := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Args: []string{disk,
		"--disk-tls-cert=" + cert, "--disk-tls-key=" + key, "--disk-server-ca=" + ca,
		"--nbd=unix:" + socket}})
	require.Contains(t, server.Get("/status"), `"cert:relay.example"`)
	uri := "nbd+unix:///disk.raw?socket=" + socket
	rig.Same(t, filepath.Join(images, "disk.raw"), uri)

	raw := filepath.Join(t.TempDir(), "raw")
	rig.Pattern(t, raw, 64<<20, 0x42)
	copied := make(chan rig.Result, 1)
	go func() {
		var r rig.Result
		for range 4 {
			if r = rig.Client(t, nil, "nbdcopy", "--flush", raw, uri); r.Status != 0 {
				break
			}
		}
		copied <- r
	}()
	// Not until it has copied: on a busy machine, the server would not live long enough.
	for range 6 {
		time.Sleep(300 * time.Millisecond)
		server.Crash()
		server = rig.Start(t, served)
	}
	r := <-copied
	require.Zero(t, r.Status, "%s", r)
	rig.Same(t, raw, uri)
	relay.Stop()
	server.Stop()
	rig.Same(t, raw, filepath.Join(state, "volume", "disk.img"))
}

// TestRelayThatCannotBe: what is wrong with a disk of another server is said at the start.
func TestRelayThatCannotBe(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	images := rig.DiskDir(t, 1<<20)
	rig.Start(t, rig.Config{DiskDir: images, Args: []string{"--nbd=unix:" + socket}})
	uri := "nbd+unix:///disk.raw?socket=" + socket
	for _, c := range []struct{ args, want string }{
		{"--disk=nbds://u:secret@h/x", "clients are known by their certificate"},
		{"--disk=nbd://h/x", "use nbds"},
		{"--disk=nbd+unix:///other?socket=" + socket, "there is no disk"},
		{"--disk=" + uri + " --disk-server-ca=/c", "is for disks of nbds://"},
		{"--disk=" + uri + " --size=1Gi", "enlarge it there"},
		{"--disk=nbds://127.0.0.1:1/x --disk-tls-cert=/c", "takes a certificate and its key"},
	} {
		_, err := rig.TryStart(t, rig.Config{DiskDir: t.TempDir(),
			Args: strings.Fields(c.args)})
		require.ErrorContains(t, err, c.want, c.args)
		require.NotContains(t, err.Error(), "secret")
	}
}
