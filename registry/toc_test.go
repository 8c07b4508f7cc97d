package registry

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/cache"
)

// tocWriter makes a layer with a table of contents.
type tocWriter struct {
	codec   string
	chunk   int // bytes of a file that are compressed together
	out     bytes.Buffer
	entries []map[string]any
}

func (w *tocWriter) member(t testing.TB, p []byte) (at int) {
	at = w.out.Len()
	if w.codec == codecGzip {
		z := gzip.NewWriter(&w.out)
		_, err := z.Write(p)
		require.NoError(t, err)
		require.NoError(t, z.Close())
		return at
	}
	z, err := zstd.NewWriter(&w.out)
	require.NoError(t, err)
	_, err = z.Write(p)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return at
}

func digestText(p []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(p)) }

// add adds a file, in chunks.
func (w *tocWriter) add(t testing.TB, f tarFile) {
	if f.kind == 0 {
		f.kind = tar.TypeReg
	}
	var head bytes.Buffer
	require.NoError(t, tar.NewWriter(&head).WriteHeader(&tar.Header{Name: f.name, Mode: 0o444,
		Size: int64(len(f.content)), Typeflag: f.kind, Linkname: f.link}))
	w.member(t, head.Bytes())
	kind := map[byte]string{tar.TypeReg: "reg", tar.TypeDir: "dir", tar.TypeLink: "hardlink",
		tar.TypeSymlink: "symlink"}[f.kind]
	first := map[string]any{"name": f.name, "type": kind, "size": len(f.content)}
	if f.link != "" {
		first["linkName"] = f.link
	}
	w.entries = append(w.entries, first)
	for off := 0; off < len(f.content); off += w.chunk {
		e := first
		if off > 0 {
			e = map[string]any{"name": f.name, "type": "chunk", "chunkOffset": off}
			w.entries = append(w.entries, e)
		}
		p := f.content[off:min(off+w.chunk, len(f.content))]
		e["offset"], e["chunkDigest"] = w.member(t, p), digestText(p)
		if w.chunk < len(f.content) && off+w.chunk < len(f.content) {
			e["chunkSize"] = len(p) // the last one goes up to the end
		}
		if w.codec == codecZstd && bytes.Equal(p, make([]byte, len(p))) {
			e["chunkType"] = chunkZeros
		}
	}
	if w.codec == codecZstd {
		first["endOffset"] = w.out.Len()
	}
	w.member(t, make([]byte, (512-len(f.content)%512)%512))
}

// layer ends the layer, and returns it with its annotations.
func (w *tocWriter) layer(t testing.TB, entries any) ([]byte, map[string]string) {
	w.member(t, make([]byte, 1024))
	text, err := json.Marshal(map[string]any{"version": 1, "entries": entries})
	require.NoError(t, err)
	if w.codec == codecGzip {
		at := w.member(t, tarOf(t, tarFile{name: stargzName, content: text}))
		z, err := gzip.NewWriterLevel(&w.out, gzip.NoCompression)
		require.NoError(t, err)
		z.Extra = fmt.Appendf([]byte{'S', 'G', 22, 0}, "%016xSTARGZ", at)
		require.NoError(t, z.Close())
		return w.out.Bytes(), map[string]string{annotationStargz: digestText(text)}
	}
	packed := zstandard(t, text)
	at := w.out.Len() + 8
	w.out.Write([]byte{0x50, 0x2a, 0x4d, 0x18, byte(len(packed)), byte(len(packed) >> 8),
		byte(len(packed) >> 16), 0})
	w.out.Write(packed)
	return w.out.Bytes(), map[string]string{annotationChunked: digestText(packed),
		annotationPlace: fmt.Sprintf("%d:%d:%d:1", at, len(packed), len(text))}
}

// annotated makes an image of one layer.
func (l *lying) annotated(t testing.TB, layer []byte, annotations map[string]string) {
	desc := l.add(layer)
	desc.MediaType, desc.Annotations = types.OCILayer, annotations
	config := l.add([]byte("{}"))
	config.MediaType = types.OCIConfigJSON
	l.tags["1"] = l.manifest(t, v1.Manifest{SchemaVersion: 2, Config: config,
		MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{desc}})
}

// TestTableOfContents serves layers that are compressed in chunks, without fetching all of them.
func TestTableOfContents(t *testing.T) {
	content := noise(70, 9<<20+12288)
	clear(content[5<<20 : 7<<20])
	small := noise(71, 3072)
	for _, codec := range []string{codecGzip, codecZstd} {
		for _, chunk := range []int{70 << 10, 1 << 20, 4 << 20} {
			t.Run(fmt.Sprint(codec, chunk>>10), func(t *testing.T) {
				w := &tocWriter{codec: codec, chunk: chunk}
				for _, f := range []tarFile{{name: "disk/", kind: tar.TypeDir},
					{name: "disk/empty.img"}, {name: "./disk/a.img", content: content},
					{name: "disk/b.img", kind: tar.TypeLink, link: "disk/a.img"},
					{name: "disk/c.img", content: small}, {name: "etc/d", content: small}} {
					w.add(t, f)
				}
				l := newLying(t)
				layer, annotations := w.layer(t, w.entries)
				l.annotated(t, layer, annotations)
				keep := t.TempDir()
				s := newStreaming(t, newClient(t, l.options()), t.TempDir(), keep)
				st := s.open(t, l.ref(t, "vm/a:1"))
				require.Equal(t, []string{"a.img", "b.img", "c.img", "empty.img"},
					namesOfDisks(st.Disks()))
				file, err := openPartOf(t, st, "a.img")
				require.NoError(t, err)
				for _, span := range [][2]int64{{0, 1}, {int64(chunk) - 1, 2}, {4 << 20, 3 << 20},
					{9 << 20, 12288}, {1, 9 << 20}} {
					p := make([]byte, span[1])
					n, err := file.ReadAt(t.Context(), p, span[0])
					require.NoError(t, err)
					require.True(t, bytes.Equal(content[span[0]:span[0]+int64(n)], p))
				}
				require.Zero(t, s.opt.Cache.Stats().Wrong)
				_, err = file.ReadAt(t.Context(), make([]byte, 1), int64(len(content)))
				require.Error(t, err)
				link, err := openPartOf(t, st, "b.img")
				require.NoError(t, err)
				require.Equal(t, file.Identity(), link.Identity())
				e, err := file.Extent(6<<20, 1<<20)
				require.NoError(t, err)
				require.True(t, e.Data || codec == codecZstd)
				c := s.disk(t, st, "c.img")
				require.False(t, c.Unverified())
				require.True(t, bytes.Equal(small, contentOf(t, c)))

				// Another daemon that finds the data verifies it again, and requests nothing.
				l.server.Close()
				again := newStreaming(t, s.client, s.opt.CacheDir, keep)
				st2 := again.open(t, l.ref(t, "vm/a:1"))
				img := again.disk(t, st2, "a.img")
				require.True(t, bytes.Equal(content, contentOf(t, img)))
				require.Zero(t, again.opt.Cache.Stats().Fetched)
			})
		}
	}
}

// TestTableWrongBytes has the registry send wrong bytes for a while. None of them is served.
func TestTableWrongBytes(t *testing.T) {
	content := noise(72, 4<<20)
	for _, codec := range []string{codecGzip, codecZstd} {
		w := &tocWriter{codec: codec, chunk: 100 << 10}
		w.add(t, tarFile{name: "disk/a.img", content: content})
		l := newLying(t)
		layer, annotations := w.layer(t, w.entries)
		l.annotated(t, layer, annotations)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
		bad := bytes.Clone(layer)
		for at := 2 << 20; at < len(bad)-200<<10; at += 100 << 10 {
			bad[at] ^= 1
		}
		l.replace(digestOf(layer), bad)
		s.wrongRead(t, img, make([]byte, 1<<20), 3<<20)
		l.replace(digestOf(layer), layer)
		require.True(t, bytes.Equal(content, contentOf(t, img)))
	}
}

// TestTableHostile reads tables that lie.
func TestTableHostile(t *testing.T) {
	content := noise(73, 1<<20)
	const chunk = 256 << 10
	for what, c := range map[string]struct {
		change func(e []map[string]any) any
		want   string // of the error; "": the image is fetched and verified first
	}{
		"a file larger than its chunks": {func(e []map[string]any) any {
			e[0]["size"] = 2 << 20
			e[3]["chunkSize"] = chunk
			return e
		}, "its chunks have"},
		"a file smaller than its chunks": {func(e []map[string]any) any {
			e[0]["size"] = 3 * chunk
			return e
		}, "are left of the file"},
		"overlapping chunks": {func(e []map[string]any) any {
			e[2]["chunkOffset"] = chunk + 1
			return e
		}, "come before it"},
		"a chunk before the one before": {func(e []map[string]any) any {
			e[2]["offset"] = e[0]["offset"]
			return e
		}, "not behind"},
		"a chunk behind the layer": {func(e []map[string]any) any {
			e[3]["offset"] = 1 << 40
			return e
		}, "not behind"},
		"a negative size": {func(e []map[string]any) any {
			e[0]["size"] = -1
			return e
		}, "-1 bytes"},
		"a huge size": {func(e []map[string]any) any {
			e[0]["size"] = int64(1) << 62
			return e
		}, "bytes"},
		"a negative chunk": {func(e []map[string]any) any {
			e[1]["chunkSize"] = -5
			return e
		}, "has -5 bytes"},
		"a name that leads out": {func(e []map[string]any) any {
			e[0]["name"] = "disk/../x"
			return e
		}, "disk/../x"},
		"a chunk of another file": {func(e []map[string]any) any {
			e[1]["name"] = "disk/z"
			return e
		}, "comes behind"},
		"no list": {func([]map[string]any) any { return 5 }, "instead of"},
		"entries that are none": {func([]map[string]any) any {
			return []int{1}
		}, "cannot unmarshal"},
		"no digest": {func(e []map[string]any) any {
			delete(e[2], "chunkDigest")
			return e
		}, ""},
		"a digest of another kind": {func(e []map[string]any) any {
			e[2]["chunkDigest"] = "md5:0123"
			return e
		}, ""},
		"a large chunk": {func(e []map[string]any) any {
			e[0]["size"], e[0]["chunkSize"] = 64<<20, 63<<20
			return e
		}, ""},
		"zeros without end": {func(e []map[string]any) any {
			e[0]["size"], e[0]["chunkSize"] = int64(1)<<60, int64(1)<<59
			e[0]["chunkType"] = chunkZeros
			return e
		}, ""},
		"a symbolic link": {func(e []map[string]any) any {
			return append(e, map[string]any{"name": "disk/l", "type": "symlink"})
		}, ""},
		"a link to nothing": {func(e []map[string]any) any {
			return append(e, map[string]any{"name": "disk/l", "type": "hardlink", "linkName": "x"})
		}, ""},
	} {
		for _, codec := range []string{codecGzip, codecZstd} {
			t.Run(what+" "+codec, func(t *testing.T) {
				w := &tocWriter{codec: codec, chunk: chunk}
				w.add(t, tarFile{name: "disk/a.img", content: content})
				layer, annotations := w.layer(t, c.change(w.entries))
				l := newLying(t)
				l.annotated(t, layer, annotations)
				s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
				st, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
				if c.want != "" {
					require.ErrorContains(t, err, c.want)
					return
				}
				require.NoError(t, err)
				img, err := st.Open(t.Context(), "a.img", image.Options{})
				require.NoError(t, err)
				require.Equal(t, 1, img.Parallel())
				require.True(t, bytes.Equal(content, contentOf(t, img)))
				require.NoError(t, errors.Join(img.Close(), st.Close()))
			})
		}
	}
}

// TestTableOfOtherData has a table with the digests of other data. Nothing of that is served, and
// the read ends, because no fetch will ever bring what the table says.
func TestTableOfOtherData(t *testing.T) {
	for _, codec := range []string{codecGzip, codecZstd} {
		w := &tocWriter{codec: codec, chunk: 256 << 10}
		w.add(t, tarFile{name: "disk/a.img", content: noise(74, 1<<20)})
		w.entries[2]["chunkDigest"] = digestText([]byte("x"))
		layer, annotations := w.layer(t, w.entries)
		l := newLying(t)
		l.annotated(t, layer, annotations)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		file, err := openPartOf(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
		require.NoError(t, err)
		_, err = file.ReadAt(t.Context(), make([]byte, 512), 600<<10)
		require.ErrorIs(t, err, disk.ErrWrongContent)
		_, err = file.ReadAt(t.Context(), make([]byte, 512), 0)
		require.NoError(t, err, "the rest of the disk is right")
		require.NoError(t, file.Close())
	}
}

func openPartOf(t testing.TB, st *Stream, name string) (image.Source, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.parts == nil {
		require.NoError(t, st.findLocked(t.Context()))
	}
	return st.openPart(t.Context(), name)
}

// TestTableOfAnotherDigest: a table that the manifest does not vouch for is not read, but fetched
// again.
func TestTableOfAnotherDigest(t *testing.T) {
	for _, codec := range []string{codecGzip, codecZstd} {
		w := &tocWriter{codec: codec, chunk: 256 << 10}
		w.add(t, tarFile{name: "disk/a.img", content: noise(75, 1<<20)})
		layer, annotations := w.layer(t, w.entries)
		for key := range annotations {
			if key != annotationPlace {
				annotations[key] = digestText([]byte("x"))
			}
		}
		l := newLying(t)
		l.annotated(t, layer, annotations)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		_, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
		var wrong *DigestError
		require.ErrorAs(t, err, &wrong)
		require.GreaterOrEqual(t, l.requests("/blobs/"), tocTries)
	}
}

// FuzzTOC reads anything as a table of contents: everything in an accepted one lies in the file and
// in the layer.
func FuzzTOC(f *testing.F) {
	w := &tocWriter{codec: codecGzip, chunk: 1000}
	w.add(f, tarFile{name: "disk/a", content: noise(76, 5000)})
	text, err := json.Marshal(map[string]any{"version": 1, "entries": w.entries})
	require.NoError(f, err)
	f.Add(text)
	f.Add([]byte(`{"entries":[{"name":"disk/a","type":"reg","size":9000000,"offset":1,` +
		`"chunkType":"zeros"},{"name":"disk/b","type":"hardlink","linkName":"disk/a"}]}`))
	store, err := cache.Open(f.TempDir(), cache.Options{})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, store.Close()) })
	const size = 1 << 20
	desc := (lying{store: map[string][]byte{}}).add(make([]byte, size))
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := readTOC(bytes.NewReader(text), "", desc, size-100, codecGzip, maxTOCChunks)
		if err != nil {
			return
		}
		shown, err := l.shown(newShadow())
		if err != nil {
			return
		}
		for _, p := range shown {
			if !under(diskDir, p.Name) || p.Size < 0 {
				t.Fatal(p)
			}
			file, _, err := newPacked(store, memoryBlob(desc, make([]byte, size)), p)
			if err != nil {
				t.Fatal(err)
			}
			for i, u := range file.units {
				if file.unitOf(u.start) != i || file.endOf(i) <= u.start {
					t.Fatal(i, u)
				}
				if p := make([]byte, file.unit); i < 100 {
					if err := file.fetch(t.Context(), p, int64(i)*file.unit); err != nil {
						t.Fatal(err)
					}
					_ = file.verify(int64(i), p)
				}
			}
		}
	})
}
