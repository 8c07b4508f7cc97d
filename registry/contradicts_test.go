package registry

import (
	"bytes"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
)

// contradicted is an image whose index says something else about its layer than that has.
func contradicted(t *testing.T, l *lying, content []byte, wrong int) (layer []byte) {
	layer = tarOf(t, tarFile{Name: "disk/a.img", Content: content})
	at := bytes.Index(layer, content[:4096])
	digests := chunkDigests(content)
	digests[wrong*digestSize] ^= 1
	desc := l.Add(layer)
	desc.MediaType = types.OCILayer
	x := &index{Version: indexVersion, ChunkSize: indexChunk, Digests: sectionOf(digests),
		Files: []indexFile{{Name: "disk/a.img", Size: int64(len(content)),
			Layer: desc.Digest.String(), Offset: int64(at)}}}
	text, err := x.Layer(true)
	require.NoError(t, err)
	second := l.Add(text)
	second.MediaType = types.OCILayer
	second.Annotations = map[string]string{annotationIndex: "1"}
	config := l.Add([]byte("{}"))
	config.MediaType = types.OCIConfigJSON
	l.Tags["1"] = l.Manifest(t, v1.Manifest{SchemaVersion: 2, Config: config,
		MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{desc, second}})
	return layer
}

// TestIndexContradictsLayer: a read whose content stays wrong waits for a while, and ends with an
// error that says what to do. Others go on.
func TestIndexContradictsLayer(t *testing.T) {
	content := noise(84, 2<<20)
	l := newLying(t)
	contradicted(t, l, content, 5)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	s.opt.timeout = time.Second
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
	p := make([]byte, 4096)
	_, err := img.ReadAt(t.Context(), p, 5*indexChunk+100)
	require.NotErrorIs(t, err, disk.ErrNotNow)
	require.ErrorContains(t, err, "push the image again")
	_, err = img.ReadAt(t.Context(), p, 6*indexChunk)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content[6*indexChunk:][:len(p)], p))
}
