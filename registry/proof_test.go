package registry

import (
	"bytes"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
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

// TestIndexContradictsLayer: a read that can never succeed ends with an error, when the index of
// the image is wrong about the layer. While it is the registry that sends wrong bytes, it waits.
func TestIndexContradictsLayer(t *testing.T) {
	content := noise(84, 2<<20)
	l := newLying(t)
	layer := contradicted(t, l, content, 5)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
	p := make([]byte, 4096)
	begin := time.Now()
	_, err := img.ReadAtContext(t.Context(), p, 5*indexChunk+100)
	require.ErrorIs(t, err, disk.ErrWrongContent)
	require.ErrorContains(t, err, "index of the image")
	require.Less(t, time.Since(begin), time.Minute)
	_, err = img.ReadAtContext(t.Context(), p, 6*indexChunk)
	require.ErrorIs(t, err, disk.ErrWrongContent, "nobody knows what else is wrong")
	_, err = s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
	require.ErrorContains(t, err, "was found wrong", "a later start remembers it")

	// An image that needs the chunk to be opened is refused at once.
	contradicted(t, l, content, 0)
	s = newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	st := s.open(t, l.ref(t, "vm/a:1"))
	_, err = st.Open(t.Context(), "a.img", image.Options{})
	require.ErrorIs(t, err, disk.ErrWrongContent)

	// The registry sends wrong bytes: the index may still be right.
	contradicted(t, l, content, 5)
	l.Replace(digestOf(layer), flipped(layer, 1<<20))
	s = newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	img = s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
	s.wrongRead(t, img, p, 5*indexChunk)
}
