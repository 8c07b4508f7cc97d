package registry

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// TestTableOfContents serves layers that are compressed in chunks, without fetching all of them.
func TestTableOfContents(t *testing.T) {
	content := noise(70, 9<<20+12288)
	clear(content[5<<20 : 7<<20])
	small := noise(71, 3072)
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		for _, chunk := range []int{70 << 10, 1 << 20, 4 << 20} {
			t.Run(fmt.Sprint(codec, chunk>>10), func(t *testing.T) {
				w := tableOf(t, codec, chunk, tarFile{Name: "disk/", Kind: tar.TypeDir},
					tarFile{Name: "disk/empty.img"},
					tarFile{Name: "./disk/a.img", Content: content},
					tarFile{Name: "disk/b.img", Kind: tar.TypeLink, Link: "disk/a.img"},
					tarFile{Name: "disk/c.img", Content: small},
					tarFile{Name: "etc/d", Content: small})
				l, _ := withTable(t, w, w.Entries)
				keep := t.TempDir()
				s := newStreaming(t, newClient(t, l.options()), t.TempDir(), keep)
				st := s.open(t, l.ref(t, "vm/a:1"))
				require.Equal(t, []string{"a.img", "b.img", "c.img", "empty.img"},
					namesOfDisks(st.Disks()))
				file := testtool.Must(openPartOf(t, st, "a.img"))(t)
				for _, span := range [][2]int64{{0, 1}, {int64(chunk) - 1, 2}, {4 << 20, 3 << 20},
					{9 << 20, 12288}, {1, 9 << 20}} {
					p := make([]byte, span[1])
					n := testtool.Must(file.ReadAt(t.Context(), p, span[0]))(t)
					require.True(t, bytes.Equal(content[span[0]:span[0]+int64(n)], p))
				}
				require.Zero(t, s.opt.Cache.Stats().Wrong)
				_, err := file.ReadAt(t.Context(), make([]byte, 1), int64(len(content)))
				require.Error(t, err)
				link := testtool.Must(openPartOf(t, st, "b.img"))(t)
				require.Equal(t, file.Identity(), link.Identity())
				e := testtool.Must(file.Extent(6<<20, 1<<20))(t)
				require.True(t, e.Data || codec == registrytest.Zstd)
				c := s.disk(t, st, "c.img")
				require.False(t, c.Unverified())
				require.True(t, bytes.Equal(small, contentOf(t, c)))

				// Another daemon that finds the data verifies it again, and requests nothing.
				l.Server.Close()
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
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		w := tableOf(t, codec, 100<<10, tarFile{Name: "disk/a.img", Content: content})
		l, layer := withTable(t, w, w.Entries)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
		bad := bytes.Clone(layer)
		for at := 2 << 20; at < len(bad)-200<<10; at += 100 << 10 {
			bad[at] ^= 1
		}
		l.Replace(digestOf(layer), bad)
		s.wrongRead(t, img, make([]byte, 1<<20), 3<<20)
		l.Replace(digestOf(layer), layer)
		require.True(t, bytes.Equal(content, contentOf(t, img)))
	}
}

// TestTableHostile reads tables that lie.
func TestTableHostile(t *testing.T) {
	content := noise(73, 1<<20)
	const chunk = 256 << 10
	type entries = []map[string]any
	set := func(i int, key string, value any) func(entries) any {
		return func(e entries) any {
			e[i][key] = value
			return e
		}
	}
	for what, c := range map[string]struct {
		change func(e entries) any
		want   string // of the error; "": the image is fetched and verified first
	}{
		"a file larger than its chunks": {func(e entries) any {
			e[0]["size"] = 2 << 20
			e[3]["chunkSize"] = chunk
			return e
		}, "its chunks have"},
		"a file smaller than its chunks": {set(0, "size", 3*chunk), "are left of the file"},
		"overlapping chunks":             {set(2, "chunkOffset", chunk+1), "come before it"},
		"a chunk before the one before": {func(e entries) any {
			e[2]["offset"] = e[0]["offset"]
			return e
		}, "not behind"},
		"a chunk behind the layer": {set(3, "offset", 1<<40), "not behind"},
		"a negative size":          {set(0, "size", -1), "-1 bytes"},
		"a huge size":              {set(0, "size", int64(1)<<62), "bytes"},
		"a negative chunk":         {set(1, "chunkSize", -5), "has -5 bytes"},
		"a name that leads out":    {set(0, "name", "disk/../x"), "disk/../x"},
		"a chunk of another file":  {set(1, "name", "disk/z"), "comes behind"},
		"no list":                  {func(entries) any { return 5 }, "instead of"},
		"entries that are none":    {func(entries) any { return []int{1} }, "cannot unmarshal"},
		"no digest": {func(e entries) any {
			delete(e[2], "chunkDigest")
			return e
		}, ""},
		"a digest of another kind": {set(2, "chunkDigest", "md5:0123"), ""},
		"a large chunk": {func(e entries) any {
			e[0]["size"], e[0]["chunkSize"] = 64<<20, 63<<20
			return e
		}, ""},
		"zeros without end": {func(e entries) any {
			e[0]["size"], e[0]["chunkSize"] = int64(1)<<60, int64(1)<<59
			e[0]["chunkType"] = "zeros"
			return e
		}, ""},
		"a symbolic link": {func(e entries) any {
			return append(e, map[string]any{"name": "disk/l", "type": "symlink"})
		}, "contradicts its tar archive"},
		"a link to nothing": {func(e entries) any {
			return append(e, map[string]any{"name": "disk/l", "type": "hardlink", "linkName": "x"})
		}, "contradicts its tar archive"},
	} {
		for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
			t.Run(what+" "+codec, func(t *testing.T) {
				w := tableOf(t, codec, chunk, tarFile{Name: "disk/a.img", Content: content})
				l, _ := withTable(t, w, c.change(w.Entries))
				s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
				st, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
				if c.want != "" {
					require.ErrorContains(t, err, c.want)
					return
				}
				require.NoError(t, err)
				img := testtool.Must(st.Open(t.Context(), "a.img", image.Options{}))(t)
				require.Equal(t, 1, img.Parallel())
				require.True(t, bytes.Equal(content, contentOf(t, img)))
				require.NoError(t, errors.Join(img.Close(), st.Close()))
			})
		}
	}
}

// TestTableOfOtherData has a table with the digests of other data. Nothing of that is served, and
// the read ends after a while: perhaps no fetch will ever bring what the table says.
func TestTableOfOtherData(t *testing.T) {
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		w := tableOf(t, codec, 256<<10, tarFile{Name: "disk/a.img", Content: noise(74, 1<<20)})
		w.Entries[2]["chunkDigest"] = registrytest.DigestText([]byte("x"))
		l, _ := withTable(t, w, w.Entries)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		s.opt.timeout = time.Second
		file := testtool.Must(openPartOf(t, s.open(t, l.ref(t, "vm/a:1")), "a.img"))(t)
		_, err := file.ReadAt(t.Context(), make([]byte, 512), 600<<10)
		require.NotErrorIs(t, err, disk.ErrNotNow)
		require.ErrorContains(t, err, "push the image again")
		require.NoError(t, testtool.Err(file.ReadAt(t.Context(), make([]byte, 512), 0)))
		require.NoError(t, file.Close())
	}
}

func openPartOf(t testing.TB, st *Stream, name string) (image.Source, error) {
	require.NoError(t, st.find(t.Context()))
	return st.openPart(t.Context(), name)
}

// TestTableOfAnotherDigest: a table that the manifest does not vouch for is not read, but fetched
// again.
func TestTableOfAnotherDigest(t *testing.T) {
	for _, codec := range []string{registrytest.Gzip, registrytest.Zstd} {
		w := tableOf(t, codec, 256<<10, tarFile{Name: "disk/a.img", Content: noise(75, 1<<20)})
		layer, annotations := w.Layer(t, w.Entries)
		for key := range annotations {
			if key != registrytest.ChunkedPlace {
				annotations[key] = registrytest.DigestText([]byte("x"))
			}
		}
		l := newLying(t)
		l.Annotated(t, layer, annotations)
		s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
		_, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
		var wrong *transport.DigestError
		require.ErrorAs(t, err, &wrong)
		require.GreaterOrEqual(t, l.Requests("/blobs/"), 3)
	}
}

// FuzzTOC reads anything as a table of contents: everything in an accepted one lies in the file and
// in the layer.
func FuzzTOC(f *testing.F) {
	w := tableOf(f, registrytest.Gzip, 1000, tarFile{Name: "disk/a", Content: noise(76, 5000)})
	f.Add(testtool.Must(json.Marshal(map[string]any{"version": 1, "entries": w.Entries}))(f))
	f.Add([]byte(`{"entries":[{"name":"disk/a","type":"reg","size":9000000,"offset":1,` +
		`"chunkType":"zeros"},{"name":"disk/b","type":"hardlink","linkName":"disk/a"}]}`))
	store := testtool.Must(cache.Open(f.TempDir(), cache.Options{}))(f)
	f.Cleanup(func() { require.NoError(f, store.Close()) })
	const size = 1 << 20
	desc := (registrytest.Lying{Store: map[string][]byte{}}).Add(make([]byte, size))
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := readTOC(bytes.NewReader(text), "", desc, size-100, registrytest.Gzip,
			maxTOCChunks)
		if err != nil {
			return
		}
		shown, err := l.Shown(newShadow())
		if err != nil {
			return
		}
		for _, p := range shown {
			if !under(diskDir, p.Name) || p.Size < 0 {
				t.Fatal(p)
			}
			file, _ := testtool.Must2(newPacked(store, memoryBlob(desc, make([]byte, size)), p))(t)
			for i, u := range file.units {
				if file.unitOf(u.start) != i || file.endOf(i) <= u.start {
					t.Fatal(i, u)
				}
				if p := make([]byte, file.unit); i < 100 {
					require.NoError(t, file.fetch(t.Context(), p, int64(i)*file.unit))
					_ = file.verify(int64(i), p)
				}
			}
		}
	})
}
