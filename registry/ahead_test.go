package registry

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/keychain"
	"kubevirt.io/disk/registry/transport"
)

// pushed pushes a file, and returns the content of its index.
func pushed(t testing.TB, m *memory, name string, content []byte, opt PushOptions) *index {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(file, content, 0o644))
	opt.Base = BaseNone
	pushes(t, m.client(t), []string{file}, m.ref(t, "vm/a:1"), opt)
	r := resolves(t, m.client(t), m.ref(t, "vm/a:1"))
	return fullIndex(t, r)
}

// fullIndex is the index of an image, with its digests and tables.
func fullIndex(t testing.TB, r *transport.Image) *index {
	t.Helper()
	keep, err := os.Create(filepath.Join(t.TempDir(), "index"))
	require.NoError(t, err)
	t.Cleanup(func() { keep.Close() })
	x, err := indexBy(r, func(desc descriptor) (x *index, err error) {
		err = r.Read(t.Context(), desc, maxIndexLayer, func(in io.Reader) error {
			x, err = parseIndex(in, r.Manifest.Layers, keep)
			return err
		})
		return x, err
	})
	require.NoError(t, err)
	return x
}

// TestStreamBootOrder: the recorded reads of a guest are fetched before anybody reads, even if the
// file is now stored in another form. Nothing else is fetched.
func TestStreamBootOrder(t *testing.T) {
	for name, opt := range map[string]PushOptions{"raw": {}, "compressed": {CompressRaw: "zstd"}} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			content := noise(7, 32<<20)
			for i := range content { // so that clusters are compressed
				content[i] &= 0x0f
			}
			blocks := []BootRun{{320, 2}, {4, 1}, {480, 1}, {8, 1}}
			opt.Boot = &BootOrder{Disks: []BootDisk{
				{Name: "a.raw", Size: 32 << 20, Blocks: blocks}}}
			x := pushed(t, m, "a.raw", content, opt)
			again := pushed(t, m, "a.raw", content, opt)
			require.Equal(t, x.Files, again.Files)
			require.NotEmpty(t, x.Files[0].Boot)

			s := newStreaming(t, m.client(t), t.TempDir(), t.TempDir())
			st := s.open(t, m.ref(t, "vm/a:1"))
			disk := st.Disks()[0].Name
			require.Nil(t, st.Booted(disk), "it is not open")
			img := s.disk(t, st, disk)
			select {
			case <-st.Booted(disk):
			case <-time.After(time.Minute):
				require.Fail(t, "the order was not fetched")
			}
			fetched := s.opt.Cache.Stats().Fetched
			total := int64(0)
			for _, r := range x.Files[0].Boot {
				total += r[1]
			}
			require.Equal(t, 1+total, fetched, "and the index")
			p := make([]byte, BootBlock)
			for _, r := range blocks {
				for block := r.First; block < r.First+r.Count; block++ {
					_, err := img.ReadAt(ended(t), p, block*BootBlock)
					require.NoError(t, err, "block %d is not here", block)
					require.True(t, bytes.Equal(content[block*BootBlock:][:BootBlock], p))
				}
			}
			_, err := img.ReadAt(ended(t), p, 200*BootBlock)
			require.Error(t, err, "nobody has asked for this one")
		})
	}
}

func ended(t testing.TB) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// TestPushBootOrder: an order belongs to the disk of its name and size. One that belongs to no disk
// is refused.
func TestPushBootOrder(t *testing.T) {
	m := newMemory(t)
	dir := t.TempDir()
	for _, name := range []string{"a.raw", "b.raw"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), noise(1, 1<<20), 0o644))
	}
	push := func(order BootOrder, names ...string) error {
		var files []string
		for _, name := range names {
			files = append(files, filepath.Join(dir, name))
		}
		_, err := m.client(t).Push(t.Context(), files, m.ref(t, "vm/a:1"),
			PushOptions{Base: BaseNone, Boot: &order})
		return err
	}
	one := func(name string, size int64) BootOrder {
		return BootOrder{Disks: []BootDisk{{Name: name, Size: size, Blocks: []BootRun{{0, 1}}}}}
	}
	require.NoError(t, push(one("other.qcow2", 1<<20), "a.raw"))
	require.NoError(t, push(one("b.qcow2", 1<<20), "a.raw", "b.raw"))
	require.ErrorContains(t, push(one("c.qcow2", 1<<20), "a.raw", "b.raw"), "not for any of these")
	require.ErrorContains(t, push(one("a.raw", 2<<20), "a.raw"), "record it again")
}

// TestStreamTables: opening an image that push has made fetches nothing, nor does the first look at
// its ends, whatever its format.
func TestStreamTables(t *testing.T) {
	content := noise(3, 24<<20)
	for name, file := range map[string][]byte{"a.raw": content, "a.qcow2": qcow2Of(t, content),
		"b.qcow2": qcow2Of(t, content, "-c", "-o", "compression_type=zstd")} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			x := pushed(t, m, name, file, PushOptions{})
			require.NotEmpty(t, x.Packed)
			s := newStreaming(t, m.client(t), t.TempDir(), t.TempDir())
			m.requests("", "")
			img := s.disk(t, s.open(t, m.ref(t, "vm/a:1")), name)
			p := make([]byte, 4096)
			for _, off := range []int64{0, img.Size() - 4096} {
				_, err := img.ReadAt(t.Context(), p, off)
				require.NoError(t, err)
				require.True(t, bytes.Equal(content[off:off+4096], p))
			}
			require.Equal(t, int64(1), s.opt.Cache.Stats().Fetched)
			require.Equal(t, 1, m.requests("GET", "/blobs/"), "the index")
			require.True(t, bytes.Equal(content, contentOf(t, img)))
		})
	}
}

// TestTablesThatLie: tables that are not as long as they say are refused, and a decompression bomb
// does not become large.
func TestTablesThatLie(t *testing.T) {
	dir, err := os.OpenRoot(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	file := func() (*os.File, error) { return osfile.NamelessIn(dir) }
	x := &index{Files: []indexFile{{Metadata: [][2]int64{{0, 512}, {4096, 512}}}}}
	w, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	for what, content := range map[string][]byte{"short": make([]byte, 1000),
		"long": make([]byte, 1025), "bomb": make([]byte, 64<<20)} {
		x.Packed = sectionOf(w.EncodeAll(content, nil))
		_, err := x.UnpackTables(file)
		require.Error(t, err, what)
	}
	x.Packed = sectionOf([]byte("no zstd"))
	_, err = x.UnpackTables(file)
	require.Error(t, err)
	x.Packed = sectionOf(w.EncodeAll(make([]byte, 1024), nil))
	f, err := x.UnpackTables(file)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	x.Files[0].Metadata[1][1] = 1 << 40
	_, err = x.UnpackTables(file)
	require.ErrorContains(t, err, "more than")
	emptyDir(t, dir.Name())
}

// TestStreamZeros: chunks of zeros are holes and not fetched, also the short one at the end.
func TestStreamZeros(t *testing.T) {
	m := newMemory(t)
	content := make([]byte, 12<<20+5*512)
	copy(content[2<<20:], noise(1, 64<<10))
	copy(content[7<<20:], noise(2, 64<<10))
	pushed(t, m, "a.raw", content, PushOptions{})
	s := newStreaming(t, m.client(t), t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, m.ref(t, "vm/a:1")), "a.raw")
	require.True(t, bytes.Equal(content, contentOf(t, img)))
	require.Equal(t, int64(1+2), s.opt.Cache.Stats().Fetched, "the index and two chunks")
	require.Equal(t, int64(2*indexChunk), img.DataSize())
	e, err := img.Extent(t.Context(), 0, img.Size())
	require.NoError(t, err)
	require.False(t, e.Data)
	require.Equal(t, int64(2<<20), e.Length)
	e, err = img.Extent(t.Context(), 2<<20, img.Size()-2<<20)
	require.NoError(t, err)
	require.True(t, e.Data)
	require.Equal(t, int64(indexChunk), e.Length)
}

// TestHostileOrder: an order that leaves its file, or is longer than the file, is refused. Chunks
// that are named twice are fetched once.
func TestHostileOrder(t *testing.T) {
	f := indexFile{Name: "disk/a", Size: 10 * indexChunk}
	for _, boot := range [][][2]int64{{{-1, 1}}, {{0, 0}}, {{10, 1}}, {{0, 11}},
		{{1 << 62, 1 << 62}}, {{0, 10}, {0, 1}}, {{5, -5}}} {
		f.Boot = boot
		require.Error(t, f.CheckBoot(10), "%v", boot)
	}
	f.Boot = [][2]int64{{9, 1}, {0, 4}, {0, 4}}
	require.NoError(t, f.CheckBoot(10))

	m := newMemory(t)
	s, _, content := oneDisk(t, m, 4<<20, transport.Options{})
	require.Equal(t, int64(1), s.opt.Cache.Stats().Fetched, "the index")
	x := pushed(t, m, "a.raw", content, PushOptions{})
	c, err := cache.Open(t.TempDir(), cache.Options{})
	require.NoError(t, err)
	r := resolves(t, m.client(t), m.ref(t, "vm/a:1"))
	layer, err := r.Source.Blob(r.Manifest.Layers[1])
	require.NoError(t, err)
	far, err := newFarFile(c, layer, x, &x.Files[0], farOptions{})
	require.NoError(t, err)
	<-far.order([][2]int64{{3, 2}, {3, 2}, {4, 1}}, x.ChunkSize)
	require.Equal(t, int64(2), c.Stats().Fetched)
	require.NoError(t, c.Close())
}

// TestFirstRequest: a registry is asked once how it wants to be asked.
func TestFirstRequest(t *testing.T) {
	l := newLying(t)
	l.NewImage(t, noise(1, 1<<20))
	opt := transport.Options{CA: l.TLS(t), Timeout: time.Second}
	resolve := func() error {
		_, err := newClient(t, opt).Resolve(t.Context(), l.ref(t, "vm/a:1"))
		return err
	}
	require.NoError(t, resolve())
	require.Equal(t, 2, l.Requests(""), "GET /v2/, and the manifest")
	l.Basic, opt.OwnHost = "me:pa55", l.Host()
	opt.Own = keychain.Credential{Username: "me", Password: "pa55"}
	require.NoError(t, resolve())
	require.Equal(t, 4, l.Requests(""))
	opt.Own.Password = "wrong"
	var status *transport.StatusError
	require.ErrorAs(t, resolve(), &status)
	require.Equal(t, http.StatusUnauthorized, status.Status)
}

// TestStreamWithoutTables opens an image as it was pushed before the index had tables: they are
// fetched.
func TestStreamWithoutTables(t *testing.T) {
	content := noise(3, 24<<20)
	m := newMemory(t)
	x := pushed(t, m, "a.qcow2", qcow2Of(t, content), PushOptions{})
	r := resolves(t, m.client(t), m.ref(t, "vm/a:1"))
	l := newLying(t)
	manifest := *r.Manifest
	for i, desc := range manifest.Layers {
		b, err := r.Source.Blob(desc)
		require.NoError(t, err)
		old, err := io.ReadAll(b.Verified(t.Context()))
		require.NoError(t, err)
		if i == 0 {
			x.Packed = nil
			old, err = x.Layer(true)
			require.NoError(t, err)
		}
		manifest.Layers[i] = l.Add(old)
		manifest.Layers[i].Annotations = desc.Annotations
	}
	l.Tags["1"] = l.Manifest(t, manifest)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.qcow2")
	require.Greater(t, s.opt.Cache.Stats().Fetched, int64(1))
	require.True(t, bytes.Equal(content, contentOf(t, img)))
}
