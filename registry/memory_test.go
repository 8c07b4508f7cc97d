package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// slim fails if the heap grows by more.
func slim(t testing.TB, most int64, work func()) {
	t.Helper()
	require.Less(t, testtool.HeapGrowth(t, work), most)
}

// opened streams an image, and returns the error.
func opened(t testing.TB, ref transport.Reference) error {
	c := newClient(t, transport.Options{})
	s := newStreaming(t, c, t.TempDir(), t.TempDir())
	st, err := c.Stream(t.Context(), ref, s.opt)
	if err == nil {
		for _, d := range st.Disks() {
			var img *image.Image
			if img, err = st.Open(t.Context(), d.Name, image.Options{}); err == nil {
				require.NoError(t, img.Close())
			}
		}
		require.NoError(t, st.Close())
	}
	return err
}

// longName is a path of n bytes.
func longName(prefix string, n int) string {
	return prefix + strings.Repeat("/"+strings.Repeat("y", 250), n/251)
}

// packedStream writes a gzip file that may be much larger than what fits in memory.
func packedStream(t testing.TB, write func(w io.Writer) error) []byte {
	var b bytes.Buffer
	z := testtool.Must(gzip.NewWriterLevel(&b, gzip.BestSpeed))(t)
	require.NoError(t, write(z))
	require.NoError(t, z.Close())
	return b.Bytes()
}

// TestMemoryOfLongNames: names and hard links of a megabyte are not kept.
func TestMemoryOfLongNames(t *testing.T) {
	layer := packedStream(t, func(w io.Writer) error {
		tw := tar.NewWriter(w)
		for i := range 100 {
			h := &tar.Header{Typeflag: tar.TypeLink, Name: fmt.Sprintf("disk/l%d", i),
				Linkname: longName(fmt.Sprint(i), 1000<<10)}
			if err := tw.WriteHeader(h); err != nil {
				return err
			}
		}
		return tw.Close()
	})
	require.Less(t, len(layer), 3<<19)
	ref := imageOf(t, layer)
	slim(t, 48<<20, func() {
		err := opened(t, ref)
		require.ErrorContains(t, err, "too long")
		require.Less(t, len(err.Error()), 1000)
	})
}

// TestMemoryOfManyNames: many layers, each with as many names as one may have, are refused before
// the names take much memory.
func TestMemoryOfManyNames(t *testing.T) {
	var layers [][]byte
	for i := range 16 {
		layers = append(layers, packedStream(t, func(w io.Writer) error {
			tw := tar.NewWriter(w)
			for j := range 900 {
				h := &tar.Header{Typeflag: tar.TypeDir,
					Name: longName(fmt.Sprintf("disk/%d-%d", i, j), 4000)}
				if err := tw.WriteHeader(h); err != nil {
					return err
				}
			}
			return tw.Close()
		}))
	}
	ref := imageOf(t, layers...)
	slim(t, 64<<20, func() { require.ErrorContains(t, opened(t, ref), "too long names") })
}

// starry is an image whose layer has a table of contents for eStargz.
func starry(t testing.TB, table func(w io.Writer) error) transport.Reference {
	var text bytes.Buffer // only to know its length and digest
	require.NoError(t, table(&text))
	digest, size := digestOf(text.Bytes()), text.Len()
	data := gzipped(t, []byte("data"))
	toc := packedStream(t, func(w io.Writer) error {
		tw := tar.NewWriter(w)
		h := &tar.Header{Name: registrytest.StargzName, Size: int64(size), Typeflag: tar.TypeReg}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := tw.Write(text.Bytes()); err != nil {
			return err
		}
		return tw.Close()
	})
	foot := registrytest.StargzFoot(t, len(data))
	s := store{}
	desc := s.Add(append(append(data, toc...), foot...))
	desc.MediaType = types.OCILayer
	desc.Annotations = map[string]string{registrytest.StargzDigest: digest}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: s.Add([]byte("{}")), Layers: []v1.Descriptor{desc}}
	return layoutOf(t, s, s.Manifest(t, m))
}

// TestMemoryOfTableOfContents: no text in a table of contents takes much memory, wherever it is.
func TestMemoryOfTableOfContents(t *testing.T) {
	const size = 64 << 20
	repeat := func(text string) func(w io.Writer) error {
		begin, what, _ := strings.Cut(text, "<")
		what, end, _ := strings.Cut(what, ">")
		block := strings.Repeat(what, 1<<20/len(what))
		return func(w io.Writer) error {
			_, err := io.WriteString(w, begin)
			for n := 0; n < size && err == nil; n += len(block) {
				_, err = io.WriteString(w, block)
			}
			if err == nil {
				_, err = io.WriteString(w, end)
			}
			return err
		}
	}
	for name, test := range map[string]struct{ text, want string }{
		"a string":         {`{"x":"<a>","entries":[]}`, "a value of more than"},
		"a name":           {`{"entries":[{"name":"<a>"}]}`, "a value of more than"},
		"an unknown list":  {`{"x":[<1,>1],"entries":[]}`, "value of more than"},
		"objects":          {`{"x":{<"y":[{}],>"z":1},"entries":[]}`, "value of more than"},
		"unknown keys":     {`{<"x":1,>"entries":[]}`, "unknown keys"},
		"a list of a file": {`{"entries":[{"name":"a","x":[<1,>1]}]}`, "a value of more than"},
		"nesting":          {`{"x":<[>`, "nested more than"},
		"space":            {`{"x":< >1}`, "a value of more than"},
		"a number":         {`{"x":<1>}`, "a value of more than"},
	} {
		t.Run(name, func(t *testing.T) {
			ref := starry(t, repeat(test.text))
			slim(t, 48<<20, func() { require.ErrorContains(t, opened(t, ref), test.want) })
		})
	}
}

// manyNames is such an image, of a file with so many chunks and so many links to it.
func manyNames(t testing.TB, chunks, links int) transport.Reference {
	sum := registrytest.DigestText(nil)
	return starry(t, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, `{"entries":[{"name":"disk/a","type":"reg","size":%d,`+
			`"offset":1,"chunkSize":1,"chunkDigest":%q}`, chunks, sum)
		for i := 1; i < chunks && err == nil; i++ {
			_, err = fmt.Fprintf(w, `,{"name":"disk/a","type":"chunk","offset":1,"innerOffset":%d,`+
				`"chunkOffset":%[1]d,"chunkSize":1,"chunkDigest":%q}`, i, sum)
		}
		for i := 0; i < links && err == nil; i++ {
			_, err = fmt.Fprintf(w, `,{"name":"disk/l%d","type":"hardlink","linkName":"disk/a"}`, i)
		}
		if err == nil {
			_, err = io.WriteString(w, `]}`)
		}
		return err
	})
}

// TestMemoryOfChunks: the chunks of all layers and links count together.
func TestMemoryOfChunks(t *testing.T) {
	ref := manyNames(t, 1<<16, 100)
	slim(t, 96<<20, func() { require.Error(t, opened(t, ref)) })
}

// TestMemoryOfManifest: a manifest of many small values is refused before it is decoded.
func TestMemoryOfManifest(t *testing.T) {
	for _, list := range []string{"layers", "manifests"} {
		s := store{}
		desc := s.Add([]byte(`{"schemaVersion":2,"` + list + `":[` +
			strings.Repeat("{},", 1<<20) + `{}]}`))
		desc.MediaType = types.OCIManifestSchema1
		ref := layoutOf(t, s, desc)
		slim(t, 32<<20, func() { require.Error(t, opened(t, ref)) })
	}
}

// hugeIndexed is an image with an index of a disk of so many zeros.
func hugeIndexed(t testing.TB, size int64) transport.Reference {
	sum := sha256.Sum256(make([]byte, indexChunk))
	disk := v1.Descriptor{MediaType: types.OCILayer, Size: size,
		Digest: v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%064d", 1)}}
	text := testtool.Must(json.Marshal(&index{Version: indexVersion, ChunkSize: indexChunk,
		Files: []indexFile{{Name: "disk/a.raw", Size: size, Layer: disk.Digest.String()}}}))(t)
	s := store{}
	above := s.Add(tarOf(t, tarFile{Name: indexName, Content: text}, tarFile{Name: chunksName,
		Content: bytes.Repeat(sum[:], int(size/indexChunk))}))
	above.MediaType = types.OCILayer
	above.Annotations = map[string]string{annotationIndex: "1"}
	ref := layoutOf(t, s, s.Manifest(t, v1.Manifest{SchemaVersion: 2,
		MediaType: types.OCIManifestSchema1, Config: s.Add([]byte("{}")),
		Layers: []v1.Descriptor{disk, above}}))
	name := filepath.Join(dirOf(ref), "blobs", "sha256", disk.Digest.Hex)
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	require.NoError(t, os.Truncate(name, size))
	return ref
}

// TestMemoryOfDigests: the digests of a large disk stay in files, also at a later start.
func TestMemoryOfDigests(t *testing.T) {
	ref := hugeIndexed(t, 512<<30)
	c := newClient(t, transport.Options{})
	s := newStreaming(t, c, t.TempDir(), t.TempDir())
	for range 2 {
		slim(t, 24<<20, func() {
			st := testtool.Must(c.Stream(t.Context(), ref, s.opt))(t)
			defer st.Close()
			img := testtool.Must(st.Open(t.Context(), "a.raw", image.Options{}))(t)
			defer img.Close()
			require.NoError(t, testtool.Err(img.ReadAt(t.Context(), make([]byte, 4096), 300<<30)))
		})
	}
}

// TestMemoryOfLinks: the chunks of a file with many names are stored and loaded once.
func TestMemoryOfLinks(t *testing.T) {
	ref := manyNames(t, 1<<15, 15)
	c := newClient(t, transport.Options{})
	s := newStreaming(t, c, t.TempDir(), t.TempDir())
	for range 2 {
		slim(t, 48<<20, func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := c.Stream(ctx, ref, s.opt) // the chunks are wrong, so its disks cannot be read
			require.Error(t, err)
		})
	}
}

// TestMemoryOfKeptBlob: a kept index is verified without being in memory.
func TestMemoryOfKeptBlob(t *testing.T) {
	k := testtool.Must(newKeptSource(nil, filepath.Join(t.TempDir(), "kept")))(t)
	defer k.dir.Close()
	h := sha256.New()
	require.NoError(t, testtool.Err(io.CopyN(h, zeroReader{}, maxIndexLayer)))
	digest := testtool.Must(v1.NewHash(transport.DigestIn(h)))(t)
	name := filepath.Join(k.dir.Name(), keptName(digest.String()))
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	require.NoError(t, os.Truncate(name, maxIndexLayer))
	slim(t, 8<<20, func() {
		b := testtool.Must(k.Blob(v1.Descriptor{Digest: digest, Size: maxIndexLayer}))(t)
		require.Equal(t, digest, b.Desc.Digest)
	})
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestMemoryOfIndex: an index is refused before what it claims takes memory.
func TestMemoryOfIndex(t *testing.T) {
	digest := v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("0", 64)}
	layers := []v1.Descriptor{{Digest: digest, Size: 1 << 30}}
	whole := func(file string) string {
		return `{"version":1,"chunkSize":262144,"files":[` + file + `]}`
	}
	many := func(piece string) string {
		const size = 8 << 20
		return strings.Repeat(piece+",", size/len(piece)-1) + piece
	}
	one, err := json.Marshal(indexFile{Name: "disk/a", Size: indexChunk, Layer: digest.String()})
	require.NoError(t, err)
	for _, c := range []struct {
		name, text, want string
		digests          int
	}{
		{"files", whole(many("{}")), "more than 1024 files", 0},
		{"ranges", whole(`{"metadata":[` + many("[]") + `]}`), "more than 1048576 ranges", 0},
		{"runs", whole(`{"boot":[` + many("[]") + `]}`), "more than 65536 runs", 0},
		{"a long range", whole(`{"boot":[[` + many("1") + `]]}`), "value of more than", 0},
		{"an unknown key", `{"x":[` + many("{}") + `]}`, "value of more than", 0},
		{"digests", whole(string(one)), "and its files have 1 chunks", 1 << 20},
		{"shared digests", whole(string(one) + "," + strings.Replace(string(one), "/a", "/b", 1)),
			"has 1 digests, and its files have 2 chunks", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			layer := tarOf(t, tarFile{Name: indexName, Content: []byte(c.text)},
				tarFile{Name: chunksName, Content: make([]byte, c.digests*digestSize)})
			keep := testtool.Must(nameless())(t)
			defer keep.Close()
			slim(t, 64<<20, func() {
				_, err := parseIndex(bytes.NewReader(layer), layers, keep)
				require.ErrorContains(t, err, c.want)
			})
		})
	}
}
