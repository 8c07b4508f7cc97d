package registry

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
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
	keep := testtool.Must(os.Create(filepath.Join(t.TempDir(), "index")))(t)
	t.Cleanup(func() { keep.Close() })
	x := testtool.Must(indexBy(r, func(desc descriptor) (x *index, err error) {
		err = r.Read(t.Context(), desc, maxIndexLayer, func(in io.Reader) error {
			x, err = parseIndex(in, r.Manifest.Layers, keep)
			return err
		})
		return x, err
	}))(t)
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
			testtool.Await(t, st.Booted(disk), "the order was not fetched")
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

// TestStreamClosedUnderAnOrder: when an image is closed, nothing more is fetched of an order, and
// what was on its way is not called wrong.
func TestStreamClosedUnderAnOrder(t *testing.T) {
	const blocks = 512
	m := newMemory(t)
	order := []BootDisk{{Name: "a.raw", Size: blocks * BootBlock, Blocks: []BootRun{{0, blocks}}}}
	pushed(t, m, "a.raw", noise(8, blocks*BootBlock),
		PushOptions{Boot: &BootOrder{Disks: order}})
	s := newStreaming(t, m.client(t), t.TempDir(), t.TempDir())
	st := testtool.Must(s.client.Stream(t.Context(), m.ref(t, "vm/a:1"), s.opt))(t)
	closed, before := make(chan struct{}), s.opt.Cache.Stats().Fetched
	m.mu.Lock()
	m.fault = func(http.ResponseWriter, *http.Request) bool {
		<-closed
		return false
	}
	m.mu.Unlock()
	img := testtool.Must(st.Open(t.Context(), "a.raw", image.Options{}))(t)
	done := st.Booted("a.raw")
	require.NoError(t, img.Close())
	require.NoError(t, st.Close())
	close(closed)
	testtool.Await(t, done, "the order goes on")
	require.Zero(t, s.opt.Cache.Stats().Wrong)
	require.Less(t, s.opt.Cache.Stats().Fetched-before, int64(blocks/4))
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
				require.NoError(t, testtool.Err(img.ReadAt(t.Context(), p, off)))
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
	dir := testtool.Must(os.OpenRoot(t.TempDir()))(t)
	defer dir.Close()
	file := func() (*os.File, error) { return osfile.NamelessIn(dir) }
	x := &index{Files: []indexFile{{Metadata: [][2]int64{{0, 512}, {4096, 512}}}}}
	w := testtool.Must(zstd.NewWriter(nil))(t)
	for what, content := range map[string][]byte{"short": make([]byte, 1000),
		"long": make([]byte, 1025), "bomb": make([]byte, 64<<20)} {
		x.Packed = sectionOf(w.EncodeAll(content, nil))
		require.Error(t, testtool.Err(x.UnpackTables(file)), what)
	}
	x.Packed = sectionOf([]byte("no zstd"))
	require.Error(t, testtool.Err(x.UnpackTables(file)))
	x.Packed = sectionOf(w.EncodeAll(make([]byte, 1024), nil))
	require.NoError(t, testtool.Must(x.UnpackTables(file))(t).Close())
	x.Files[0].Metadata[1][1] = 1 << 40
	require.ErrorContains(t, testtool.Err(x.UnpackTables(file)), "more than")
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
	e := testtool.Must(img.Extent(t.Context(), 0, img.Size()))(t)
	require.False(t, e.Data)
	require.Equal(t, int64(2<<20), e.Length)
	e = testtool.Must(img.Extent(t.Context(), 2<<20, img.Size()-2<<20))(t)
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
	c := testtool.Must(cache.Open(t.TempDir(), cache.Options{}))(t)
	r := resolves(t, m.client(t), m.ref(t, "vm/a:1"))
	layer := testtool.Must(r.Source.Blob(r.Manifest.Layers[1]))(t)
	far := testtool.Must(newFarFile(c, layer, x, &x.Files[0], farOptions{}))(t)
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
	require.Equal(t, 8, l.Requests(""), "a wrong password is sent twice: registries lock accounts")
	l.Token = true
	require.ErrorAs(t, resolve(), &status)
	require.Equal(t, http.StatusUnauthorized, status.Status)
	require.Equal(t, 2, l.Requests("/token"), "also to a token server")
	l.Token, opt.Own = false, keychain.Credential{}
	sent := l.Requests("")
	require.ErrorAs(t, resolve(), &status)
	require.Equal(t, sent+4, l.Requests(""), "where there is none, it is looked for twice")
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
		old, err := io.ReadAll(testtool.Must(r.Source.Blob(desc))(t).Verified(t.Context()))
		require.NoError(t, err)
		if i == 0 {
			x.Packed = nil
			old = testtool.Must(x.Layer(true))(t)
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

// TestBootOrder: an order that is written can be read, and a block that is named twice counts once.
func TestBootOrder(t *testing.T) {
	d := BootDisk{Name: "a b.qcow2", Size: 10 << 20}
	for _, block := range []int64{0, 7, 8, 9, 3} {
		d.Add(block)
	}
	order := &BootOrder{Disks: []BootDisk{d, {Name: "b", Size: 1}}}
	var b bytes.Buffer
	require.NoError(t, testtool.Err(order.WriteTo(&b)))
	require.Equal(t, bootHead+"\ndisk 10485760 \"a b.qcow2\"\n0\n7+2\n3\ndisk 1 \"b\"\n",
		b.String())
	again := testtool.Must(ReadBootOrder(&b))(t)
	require.Equal(t, order, again)

	again, err := ReadBootOrder(strings.NewReader(bootHead + "\ndisk 1000000 \"a\"\n4+1\n5+1\n4\n"))
	require.NoError(t, err)
	require.Equal(t, []BootRun{{4, 3}}, again.Disks[0].Blocks)
}

// TestBootOrderRefuses: an order that makes no sense is refused, and the error names the line.
func TestBootOrderRefuses(t *testing.T) {
	disk := bootHead + "\ndisk 1000000 \"a\"\n"
	for text, want := range map[string]string{
		"":                               "not a boot order",
		"kubevirt-disk boot order 2\n":   "not a boot order",
		bootHead + "\n7\n":               "line 2: blocks come before",
		bootHead + "\ndisk 0 \"a\"\n":    "not the size",
		bootHead + "\ndisk 9 a\n":        "not a quoted name",
		disk + "-1\n":                    "line 3: \"-1\" is neither a block",
		disk + "1+-1\n":                  "neither a block",
		disk + "1+x\n":                   "neither a block",
		disk + "16\n":                    "does not lie in a disk of 16 blocks",
		disk + "15+1\n":                  "does not lie in",
		disk + "9223372036854775807+1\n": "does not lie in",
		bootHead + "\ndisk 9223372036854775807 \"a\"\n0+40000\n": "more than 32768 blocks",
		bootHead + "\ndisk 9223372036854775807 \"a\"\n0+32767\n40000\n": "line 4: there are more " +
			"than 32768 blocks",
		bootHead + "\n" + strings.Repeat("disk 1 \"a\"\n", 1025): "more than 1024 disks",
		bootHead + "\n" + strings.Repeat("x", 70000):             "too long",
		disk + strings.Repeat("1\n", 9<<20):                      "more than 16777216 bytes",
	} {
		_, err := ReadBootOrder(strings.NewReader(text))
		require.ErrorContains(t, err, want, "%.60q", text)
	}
}

// FuzzBootOrder reads anything as a boot order. What is accepted is bounded, lies in its disks, and
// is the same after it is written and read again.
func FuzzBootOrder(f *testing.F) {
	f.Add([]byte(bootHead + "\ndisk 1000000 \"a\"\n4+1\n5+1\n4\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		order, err := ReadBootOrder(bytes.NewReader(content))
		if err != nil {
			return
		}
		for _, d := range order.Disks {
			n := int64(0)
			for _, r := range d.Blocks {
				n += r.Count
				if r.First < 0 || r.Count < 1 || (r.First+r.Count-1)*BootBlock >= d.Size {
					t.Fatal(d)
				}
			}
			if n > MaxBootBlocks {
				t.Fatal(n)
			}
		}
		var b bytes.Buffer
		if _, err := order.WriteTo(&b); err != nil {
			t.Fatal(err)
		}
		again, err := ReadBootOrder(&b)
		if err != nil || fmt.Sprint(again) != fmt.Sprint(order) {
			t.Fatal(err, again, order)
		}
	})
}
