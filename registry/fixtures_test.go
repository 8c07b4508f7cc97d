package registry

import (
	"bytes"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

type (
	fault   = registrytest.Fault
	store   = registrytest.Store
	tarFile = registrytest.TarFile
)

var (
	digestOf  = transport.DigestOf
	bytesOf   = filetest.Content
	emptyDir  = filetest.Empty
	namesIn   = filetest.Names
	readAt    = filetest.Read[int]
	usedBytes = filetest.Allocated
	cut       = registrytest.Cut
	gzipped   = registrytest.Gzipped
	noise     = registrytest.Noise
	qcow2Of   = registrytest.Qcow2Of
	qemuImg   = registrytest.QemuImg
	says      = registrytest.Says
	tarOf     = registrytest.TarOf
	zstandard = registrytest.Zstandard
)

// The files of an index layer. Images that were pushed once have these names.
const (
	indexName  = ".kubevirt-disk/index.json"
	chunksName = ".kubevirt-disk/sha256"
)

func newClient(t testing.TB, opt transport.Options) *Client {
	t.Helper()
	c := testtool.Must(New(opt))(t)
	t.Cleanup(c.Close)
	return c
}

// onlyFile checks that the directory has one file, with that content.
func onlyFile(t testing.TB, dir, name string, want []byte) {
	t.Helper()
	require.Equal(t, []string{name}, namesIn(t, dir))
	got := bytesOf(t, filepath.Join(dir, name))
	require.True(t, bytes.Equal(want, got), "%s has another content", name)
}

func platformOf(arch string) *v1.Platform { return &v1.Platform{OS: "linux", Architecture: arch} }

func otherArch() string {
	if runtime.GOARCH == "arm64" {
		return "amd64"
	}
	return "arm64"
}

// layoutOf writes an OCI layout of one image.
func layoutOf(t testing.TB, s store, image v1.Descriptor) transport.Reference {
	return testtool.Must(transport.ParseReference("oci:" + s.Layout(t, image)))(t)
}

// imageOf writes an OCI layout of an image with these layers, the lowest first.
func imageOf(t testing.TB, layers ...[]byte) transport.Reference {
	s := store{}
	return layoutOf(t, s, s.Image(t, layers...))
}

// orasOf writes an OCI layout of an artifact of one file.
func orasOf(t testing.TB, title string, content []byte) transport.Reference {
	s := store{}
	return layoutOf(t, s, artifactOf(t, s, orasLayer(s, title, content)))
}

// indexOf is an index of images.
func indexOf(t testing.TB, s store, artifactType string, images ...v1.Descriptor) v1.Descriptor {
	desc := s.Manifest(t, map[string]any{"schemaVersion": 2, "mediaType": types.OCIImageIndex,
		"artifactType": artifactType, "manifests": images})
	desc.MediaType = types.OCIImageIndex
	return desc
}

// tableOf is a layer of files with a table of contents.
func tableOf(t testing.TB, codec string, chunk int, files ...tarFile) *registrytest.Table {
	w := &registrytest.Table{Codec: codec, Chunk: chunk}
	for _, f := range files {
		w.Add(t, f)
	}
	return w
}

// withTable is a registry with an image of such a layer, whose table has these entries.
func withTable(t testing.TB, w *registrytest.Table, entries any) (l *lying, layer []byte) {
	layer, annotations := w.Layer(t, entries)
	l = newLying(t)
	l.Annotated(t, layer, annotations)
	return l, layer
}

// warnings are those of a client.
type warnings struct {
	mu    sync.Mutex
	texts []string // guarded by mu
}

func (w *warnings) add(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.texts = append(w.texts, text)
}

func (w *warnings) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.texts)
}

// dirOf is the directory of an OCI layout.
func dirOf(ref transport.Reference) string { return strings.TrimPrefix(ref.String(), "oci:") }

// lying is a registry that misbehaves, for the client here.
type lying struct{ *registrytest.Lying }

func newLying(t testing.TB) *lying { return &lying{registrytest.NewLying(t)} }

func (l *lying) ref(t testing.TB, name string) transport.Reference {
	return testtool.Must(transport.ParseReference(l.Host() + "/" + name))(t)
}

func (l *lying) options() transport.Options {
	return transport.Options{Insecure: []string{l.Host()}}
}

type (
	index     = layer.Index
	indexFile = layer.IndexFile
	layerList = layer.List
)

var (
	chunkDigests = layer.ChunkDigests
	indexBy      = layer.IndexBy
	newShadow    = layer.NewShadow
	openLayer    = layer.Open
	parseIndex   = layer.ParseIndex
	readIndex    = wholeIndex
	readTOC      = layer.ReadTOC
	readTar      = layer.ReadTar
	sectionOf    = layer.SectionOf
	under        = layer.Under
)

const (
	annotationIndex = layer.AnnotationIndex
	digestSize      = layer.DigestSize
	diskDir         = layer.DiskDir
	indexChunk      = layer.IndexChunk
	indexVersion    = layer.IndexVersion
	maxIndexLayer   = layer.MaxIndexLayer
	maxShown        = layer.MaxShown
	maxTOCChunks    = layer.MaxTOCChunks
	mediaDisk       = layer.MediaDisk
	mediaEmpty      = layer.MediaEmpty
)
