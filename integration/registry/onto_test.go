package registry

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestRegistryOnto pushes a disk, changes two percent of it, and pushes that onto the first one, in
// another repository. Little is sent and fetched, for the push, which has a copy of the old file,
// and for a node that has the old version. The new image is pulled, streamed, and read by QEMU, as
// the disk that was pushed.
func TestRegistryOnto(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	w := rig.NewWatchedRegistry(t)
	dir := t.TempDir()
	raw, old := filepath.Join(dir, "fedora.raw"), filepath.Join(dir, "old.raw")
	content := make([]byte, 48<<20)
	random := rand.NewChaCha8([32]byte{36})
	_, _ = random.Read(content)
	for i := range content { // only half of it, so that clusters can be compressed
		content[i] &= 0x0f
	}
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	require.NoError(t, os.WriteFile(old, content, 0o644))
	insecure := "--insecure-registry=" + w.Proxy
	rig.MustRun(t, nil, "push", "--base=none", insecure, raw, w.Proxy+"/vm/fedora:42")
	whole := w.Received.Load()

	// A node has the old version.
	cache := t.TempDir()
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write", "--cache-dir="+cache))
	rig.Same(t, old, d.URL(1))
	d.Stop()

	_, _ = random.Read(content[10<<20 : 10<<20+512<<10])
	_, _ = random.Read(content[30<<20+4096 : 30<<20+512<<10])
	clear(content[40<<20 : 40<<20+128<<10])
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	was := filepath.Join(t.TempDir(), "fedora.qcow2")
	rig.MustRun(t, nil, "pull", insecure, "--format=original", w.Proxy+"/vm/fedora:42", was)
	w.Received.Store(0)
	w.Sent.Store(0)
	args := []string{"push", insecure, "--onto=" + w.Proxy + "/vm/fedora:42",
		"--onto-file=" + was, raw}
	pushed := rig.MustRun(t, nil, append(args, w.Proxy+"/vm2/fedora:43")...)
	sent, fetched := w.Received.Load(), w.Sent.Load()
	t.Logf("%d bytes sent and %d fetched; the whole disk took %d", sent, fetched, whole)
	require.Less(t, sent, whole/10)
	require.Less(t, fetched, whole/4)
	digest := pushedDigest.FindString(pushed.Output)
	again := rig.MustRun(t, nil, append(args, w.Proxy+"/vm3/fedora:43")...)
	require.Equal(t, digest, pushedDigest.FindString(again.Output))

	ref := w.Proxy + "/vm2/fedora:43"
	out := t.TempDir()
	rig.MustRun(t, nil, "pull", insecure, ref, filepath.Join(out, "new.raw"))
	rig.SameFile(t, raw, filepath.Join(out, "new.raw"))
	for _, name := range []string{"fedora.qcow2", "fedora.1.qcow2"} {
		rig.MustRun(t, nil, "pull", insecure, "--path="+name, "--format=original", ref,
			filepath.Join(out, name))
	}
	for _, args := range [][]string{
		{"check", "-f", "qcow2", filepath.Join(out, "fedora.1.qcow2")},
		{"compare", "-f", "qcow2", "-F", "raw", filepath.Join(out, "fedora.1.qcow2"), raw},
		{"compare", "-f", "qcow2", "-F", "raw", filepath.Join(out, "fedora.qcow2"), old},
	} {
		r := rig.Client(t, nil, "qemu-img", args...)
		require.Zero(t, r.Status, "%s", r)
	}
	// One file, where only that will do.
	rig.MustRun(t, nil, "push", "--base=none", insecure, filepath.Join(out, "new.raw"),
		w.Proxy+"/vm/flat:43")

	differ := layerSize(t, w, "vm2/fedora", digest)
	w.Sent.Store(0)
	next := rig.Config{DiskDir: t.TempDir(), Args: []string{"--image=" + ref, insecure,
		"--copy-mode=copy-on-write", "--cache-dir=" + cache}}
	d = rig.Start(t, next)
	rig.Same(t, raw, d.URL(1))
	d.Stop()
	t.Logf("%d bytes fetched to start the new version, of which %d differ", w.Sent.Load(), differ)
	const headers = 2 * 2 * 16 << 10 // of two layers, which are compared with the index
	require.Less(t, (w.Sent.Load()-headers)*10, differ*12)
}

// layerSize is the size of the top layer of an image. Bytes.
func layerSize(t *testing.T, w *rig.WatchedRegistry, repository, digest string) int64 {
	t.Helper()
	all := layerSizes(t, w, repository, digest)
	return all[len(all)-1]
}

// layerSizes are the sizes of the layers of an image, which is named by a digest or a tag. Bytes.
func layerSizes(t *testing.T, w *rig.WatchedRegistry, repository, digest string) (sizes []int64) {
	t.Helper()
	for {
		req := testtool.Must(http.NewRequestWithContext(t.Context(), http.MethodGet,
			"http://"+w.Address+"/v2/"+repository+"/manifests/"+digest, nil))(t)
		req.Header.Set("Accept", strings.Join([]string{
			"application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json",
		}, ","))
		res := testtool.Must(http.DefaultClient.Do(req))(t)
		var text bytes.Buffer
		require.NoError(t, testtool.Err(text.ReadFrom(res.Body)))
		require.NoError(t, res.Body.Close())
		var says struct {
			Manifests []struct{ Digest string }
			Layers    []struct{ Size int64 }
		}
		require.NoError(t, json.Unmarshal(text.Bytes(), &says), "%s", text.String())
		if len(says.Manifests) > 0 {
			digest = says.Manifests[0].Digest
			continue
		}
		require.NotEmpty(t, says.Layers, "%s", text.String())
		for _, l := range says.Layers {
			sizes = append(sizes, l.Size)
		}
		return sizes
	}
}
