package integration

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/targettest"
)

// pushBuilt builds an image of a file with buildah, and pushes it.
func pushBuilt(t *testing.T, address, file string, args ...string) {
	t.Helper()
	e, err := newEngine()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.remove()) })
	work, base := t.TempDir(), filepath.Base(file)
	require.NoError(t, os.Link(file, filepath.Join(work, base)))
	dockerfile := filepath.Join(work, "Dockerfile")
	require.NoError(t, os.WriteFile(dockerfile, []byte("FROM scratch\nADD "+base+" /disk/\n"),
		0o644))
	name := address + "/vm/fedora:42"
	e.ok(t, "buildah", "build", "--quiet", "--file", dockerfile, "--tag", name, work)
	e.ok(t, "buildah", append(append([]string{"push", "--tls-verify=false"}, args...), name)...)
}

// TestStreamWhenComplete serves an uncompressed layer before it is verified, and verifies it
// meanwhile, in every mode.
func TestStreamWhenComplete(t *testing.T) {
	t.Parallel()
	requireTools(t, "docker-registry", "qemu-img")
	raw := newLargeDisk(t)
	w := newWatchedRegistry(t)
	pushPlain(t, w.address, raw)
	p := newLyingProxy(t, w.address)
	for _, mode := range []string{"copy-on-write", "clone"} {
		t.Run(mode, func(t *testing.T) {
			p.flipping(false)
			c := streaming(t.TempDir(), p.address, mode, "--verify=when-complete")
			c.stateDir = t.TempDir()
			d := start(t, c)
			require.Contains(t, d.Output(), "served before its content is verified")
			sameDisk(t, d, 1, raw)
			d.until("it is verified", func() bool { return verified(t, c.stateDir) })
			require.Contains(t, d.get("/metrics"), "kubevirt_disk_lun_failed{")
			d.stop()
			d = start(t, c)
			require.NotContains(t, d.Output(), "served before its content is verified")
			sameDisk(t, d, 1, raw)
			d.stop()
		})
		t.Run("wrong "+mode, func(t *testing.T) {
			p.flipping(true)
			c := streaming(t.TempDir(), p.address, mode, "--verify=when-complete")
			c.stateDir = t.TempDir()
			d := start(t, c)
			d.untilSaid("the image has wrong content")
			s := loginTo(t, d, "iqn.2026-01.test:first")
			_, err := s.ClearAttention(1)
			require.NoError(t, err)
			for _, command := range []targettest.Command{readBlock(1, 0),
				targettest.Write10(1, 7, block(7, 0x5a))} {
				r := do(t, s, command)
				require.False(t, r.Good())
				require.EqualValues(t, 3, r.Sense.Key, "MEDIUM ERROR")
			}
			logout(t, s)
			require.Contains(t, d.get("/status"), "wrong content")
			require.Regexp(t, `(?m)^kubevirt_disk_lun_failed{.*} 1`, d.get("/metrics"))
			d.kill()
			_, output := refused(t, c)
			require.Contains(t, output, "remove the disk")
		})
	}
}

// verified reports whether the layer of the image was verified, according to the notes.
func verified(t *testing.T, dir string) bool {
	names, err := filepath.Glob(filepath.Join(dir, "*", ".images", "notes-*"))
	require.NoError(t, err)
	more, err := filepath.Glob(filepath.Join(dir, ".images", "notes-*"))
	require.NoError(t, err)
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
	requireTools(t, "docker-registry", "qemu-img", "buildah", "podman")
	requireRoot(t)
	raw := newLargeDisk(t)
	w := newWatchedRegistry(t)
	pushBuilt(t, w.address, raw, "--compression-format=zstd:chunked")
	d := start(t, streaming(t.TempDir(), w.proxy, "copy-on-write"))
	s := loginTo(t, d, "iqn.2026-01.test:first")
	_, err := s.ClearAttention(1)
	require.NoError(t, err)
	require.True(t, do(t, s, readBlock(1, 0)).Good())
	logout(t, s)
	n, _ := w.asked()
	require.Less(t, n, 20, "it was not fetched first")
	require.NotContains(t, d.Output(), "is fetched and verified before")
	sameDisk(t, d, 1, raw)
	require.Regexp(t, `(?m)^kubevirt_disk_registry_wrong_chunks_total 0`, d.get("/metrics"))
}
