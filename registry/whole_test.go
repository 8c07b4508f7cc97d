package registry

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/registry/transport"
)

// TestWholeLayer checks the layer of a file of the index when all of the file was read, without
// fetching it again.
func TestWholeLayer(t *testing.T) {
	m := newMemory(t)
	s, img, _ := oneDisk(t, m, 5<<20+512, transport.Options{})
	require.False(t, img.Unverified())
	contentOf(t, img)
	before := s.opt.Cache.Stats().Fetched
	require.NoError(t, img.Verify(t.Context()))
	require.Equal(t, before, s.opt.Cache.Stats().Fetched)
}

// TestWholeLayerNotHere makes no check if most chunks would have to be fetched for it.
func TestWholeLayerNotHere(t *testing.T) {
	m := newMemory(t)
	s, img, _ := oneDisk(t, m, 40<<20, transport.Options{})
	require.NoError(t, img.Verify(t.Context()))
	require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(30<<20))
}

// TestWholeLayerOfAnotherIndex has an index that describes another layer than the one in the
// manifest: its chunks are right, and the bytes around them are not.
func TestWholeLayerOfAnotherIndex(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.raw")
	content := noise(1, 3<<20)
	require.NoError(t, os.WriteFile(file, content, 0o644))
	m := newMemory(t)
	_, err := m.client(t).Push(t.Context(), []string{file}, m.ref(t, "vm/a:1"),
		PushOptions{Base: BaseNone})
	require.NoError(t, err)
	r, err := m.client(t).Resolve(t.Context(), m.ref(t, "vm/a:1"))
	require.NoError(t, err)
	x, err := readIndex(t.Context(), r)
	require.NoError(t, err)

	l := newLying(t)
	manifest := *r.Manifest
	manifest.Layers = nil
	other := tarOf(t, tarFile{Name: "disk/b.raw", Content: content})
	lied := l.Add(other)
	delete(l.Store, lied.Digest.String())
	lied.Digest = v1.Hash{Algorithm: "sha256", Hex: x.Files[0].Layer[len("sha256:"):]}
	l.Store[x.Files[0].Layer] = other
	for _, desc := range r.Manifest.Layers {
		if desc.Digest == lied.Digest {
			lied.MediaType = desc.MediaType
			manifest.Layers = append(manifest.Layers, lied)
			continue
		}
		text, err := r.Small(t.Context(), desc, maxIndexLayer)
		require.NoError(t, err)
		l.Add(text)
		manifest.Layers = append(manifest.Layers, desc)
	}
	l.Tags["1"] = l.Manifest(t, manifest)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	st := s.open(t, l.ref(t, "vm/a:1"))
	st.pause = 0
	img := s.disk(t, st, "a.raw")
	require.True(t, bytes.Equal(content, contentOf(t, img)), "that is what the index says")
	err = img.Verify(t.Context())
	require.ErrorIs(t, err, disk.ErrWrongContent)
	require.ErrorContains(t, err, x.Files[0].Layer)
}
