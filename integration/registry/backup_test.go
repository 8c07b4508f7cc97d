package registry

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

// TestBackupExample backs a disk up three times while its guest writes to it. The example itself
// compares what it restores with what the guest had.
func TestBackupExample(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "nbdcopy", "nbdsh")
	raw, _ := rig.NewFullDisk(t)
	w := rig.NewWatchedRegistry(t)
	image := w.Proxy + "/vm/fedora:42"
	rig.MustRun(t, nil, "push", "--base=none", "--insecure-registry="+w.Proxy, raw, image)
	whole := w.Received.Load()
	dir := t.TempDir()
	socket, kept := filepath.Join(dir, "nbd.sock"), filepath.Join(dir, "kept")
	require.NoError(t, os.Mkdir(kept, 0o700))
	c := streaming(t.TempDir(), w.Proxy, "copy-on-write", "--nbd=unix:"+socket,
		"--persistent-dir="+kept)
	c.StateDir = t.TempDir()
	d := rig.Start(t, c)
	defer d.Stop()
	guest := testtool.Must(nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket}))(t)
	over, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		r, block := rand.New(rand.NewPCG(36, 3)), make([]byte, 4096)
		for {
			select {
			case <-over:
				stopped <- guest.Close()
				return
			case <-time.After(5 * time.Millisecond):
			}
			for i := range block {
				block[i] = byte(r.Uint32())
			}
			if _, err := guest.WriteAt(t.Context(), block, r.Int64N(256)*4096); err != nil {
				stopped <- err
				return
			}
		}
	}()
	defer func() {
		close(over)
		require.NoError(t, <-stopped)
	}()

	program := rig.Program(t)
	env := []string{"PATH=" + filepath.Dir(program) + ":" + os.Getenv("PATH"),
		"WORK_DIR=" + filepath.Join(c.StateDir, "work"), "NBD_SOCKET=" + socket,
		"INSECURE_REGISTRY=" + w.Proxy, "HOME=" + dir}
	// The third run cannot delete the snapshot of the one before. The fourth one works all the
	// same.
	for n := range 4 {
		var last string
		if n == 2 {
			text := testtool.Must(os.ReadFile(filepath.Join(dir, "last")))(t)
			last = strings.TrimSpace(string(text))
			rig.OKEnv(t, env, program, "snapshot", "serve", "1", last)
		}
		w.Received.Store(0)
		said := rig.OKEnv(t, env, "../../examples/backup.sh", "1", image, w.Proxy+"/backups/vm",
			dir)
		require.Contains(t, said, "backed up as "+w.Proxy+"/backups/vm:backup-")
		require.Equal(t, n > 0, strings.Contains(said, " of 25165824 bytes\n"), said)
		require.Less(t, w.Received.Load(), whole/5, "an increment")
		if n == 2 {
			rig.OKEnv(t, env, program, "snapshot", "unserve", "1", last)
			rig.OKEnv(t, env, program, "snapshot", "delete", "1", last)
		}
		require.Equal(t, 1, strings.Count(rig.OKEnv(t, env, program, "snapshot", "list"),
			"backup-"))
	}
}
