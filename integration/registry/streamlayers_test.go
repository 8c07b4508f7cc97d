package registry

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// pushBuilt builds an image of a file with buildah, and pushes it.
func pushBuilt(t *testing.T, address, file string, args ...string) {
	t.Helper()
	e := rig.OwnEngine(t)
	work, base := t.TempDir(), filepath.Base(file)
	require.NoError(t, os.Link(file, filepath.Join(work, base)))
	dockerfile := filepath.Join(work, "Dockerfile")
	require.NoError(t, os.WriteFile(dockerfile, []byte("FROM scratch\nADD "+base+" /disk/\n"),
		0o644))
	name := address + "/vm/fedora:42"
	e.OK(t, "buildah", "build", "--quiet", "--file", dockerfile, "--tag", name, work)
	e.OK(t, "buildah", append(append([]string{"push", "--tls-verify=false"}, args...), name)...)
}

// TestStreamWhenComplete serves an uncompressed layer before it is verified, and verifies it
// meanwhile, in every mode.
func TestStreamWhenComplete(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw := rig.NewLargeDisk(t)
	w := rig.NewWatchedRegistry(t)
	rig.PushPlain(t, w.Address, raw)
	for _, mode := range []string{"copy-on-write", "clone"} {
		t.Run(mode, func(t *testing.T) {
			w.Flips.Store(false)
			c := streaming(t.TempDir(), w.Proxy, mode, "--verify=when-complete")
			c.StateDir = t.TempDir()
			d := rig.Start(t, c)
			require.Contains(t, d.Output(), "served before its content is verified")
			rig.Same(t, raw, d.URL(1))
			d.Until("it is verified", func() bool { return verified(t, c.StateDir) })
			require.Contains(t, d.Get("/metrics"), "kubevirt_disk_lun_failed{")
			d.Stop()
			d = rig.Start(t, c)
			require.NotContains(t, d.Output(), "served before its content is verified")
			rig.Same(t, raw, d.URL(1))
			d.Stop()
		})
		t.Run("wrong "+mode, func(t *testing.T) {
			w.Flips.Store(true)
			c := streaming(t.TempDir(), w.Proxy, mode, "--verify=when-complete")
			c.StateDir = t.TempDir()
			d := rig.Start(t, c)
			d.UntilSaid("the image has wrong content")
			s := rig.LoginTo(t, d, "iqn.2026-01.test:first")
			require.NoError(t, testtool.Err(s.ClearAttention(1)))
			for _, command := range []targettest.Command{rig.ReadBlock(1, 0),
				targettest.Write10(1, 7, rig.Block(7, 0x5a))} {
				r := rig.Do(t, s, command)
				require.False(t, r.Good())
				require.EqualValues(t, 3, r.Sense.Key, "MEDIUM ERROR")
			}
			rig.Logout(t, s)
			require.Contains(t, d.Get("/status"), "wrong content")
			require.Regexp(t, `(?m)^kubevirt_disk_lun_failed{.*} 1`, d.Get("/metrics"))
			d.Crash()
			_, output := rig.Refused(t, c)
			require.Contains(t, output, "remove the disk")
		})
	}
}

// verified reports whether the layer of the image was verified, according to the notes.
func verified(t *testing.T, dir string) bool {
	names := testtool.Must(filepath.Glob(filepath.Join(dir, "*", ".images", "notes-*")))(t)
	more := testtool.Must(filepath.Glob(filepath.Join(dir, ".images", "notes-*")))(t)
	for _, name := range append(names, more...) {
		content, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was replaced meanwhile
		}
		require.NoError(t, err)
		if len(content) > 8 && content[8] == 1 {
			return true
		}
	}
	return false
}

// TestStreamChunked serves an image that podman has pushed as zstd:chunked, without fetching it
// first.
func TestStreamChunked(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "buildah", "podman")
	rig.NeedRoot(t)
	raw := rig.NewLargeDisk(t)
	w := rig.NewWatchedRegistry(t)
	pushBuilt(t, w.Address, raw, "--compression-format=zstd:chunked")
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write"))
	s := rig.LoginTo(t, d, "iqn.2026-01.test:first")
	require.NoError(t, testtool.Err(s.ClearAttention(1)))
	require.True(t, rig.Do(t, s, rig.ReadBlock(1, 0)).Good())
	rig.Logout(t, s)
	require.Less(t, w.Asked(), 20, "it was not fetched first")
	require.NotContains(t, d.Output(), "is fetched and verified before")
	rig.Same(t, raw, d.URL(1))
	require.Regexp(t, `(?m)^kubevirt_disk_registry_wrong_chunks_total 0`, d.Get("/metrics"))
}
