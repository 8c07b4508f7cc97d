package integration

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
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

// newLargeDisk makes a raw disk that is so large that it is not fetched just to look into it.
func newLargeDisk(t *testing.T) string {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "large.raw")
	content := make([]byte, 40<<20)
	random := rand.NewChaCha8([32]byte{2})
	_, _ = random.Read(content)
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	return raw
}

// pushPlain pushes an image with an uncompressed layer without an index.
func pushPlain(t *testing.T, address, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	require.NoError(t, w.WriteHeader(&tar.Header{Name: "disk/" + filepath.Base(file), Mode: 0o444,
		Size: int64(len(content)), Typeflag: tar.TypeReg}))
	_, err = w.Write(content)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	describe := func(content []byte, kind string) string {
		send(t, address, content)
		return fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.%s","size":%d,`+
			`"digest":"sha256:%x"}`, kind, len(content), sha256.Sum256(content))
	}
	put(t, "http://"+address+"/v2/vm/fedora/manifests/42",
		"application/vnd.oci.image.manifest.v1+json", []byte(`{"schemaVersion":2,`+
			`"mediaType":"application/vnd.oci.image.manifest.v1+json","config":`+
			describe([]byte("{}"), "config.v1+json")+`,"layers":[`+
			describe(layer.Bytes(), "layer.v1.tar")+`]}`))
}

// send uploads a blob in one request.
func send(t *testing.T, address string, content []byte) {
	t.Helper()
	res, err := http.Post("http://"+address+"/v2/vm/fedora/blobs/uploads/", "", nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	put(t, fmt.Sprintf("%s&digest=sha256:%x", res.Header.Get("Location"), sha256.Sum256(content)),
		"application/octet-stream", content)
}

func put(t *testing.T, address, kind string, content []byte) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, address, bytes.NewReader(content))
	require.NoError(t, err)
	req.Header.Set("Content-Type", kind)
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusCreated, res.StatusCode)
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
