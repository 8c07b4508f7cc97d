package registry

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// streaming has the parts of a daemon that stream images.
type streaming struct {
	client *Client
	opt    StreamOptions
}

func newStreaming(t testing.TB, c *Client, dir, keep string) *streaming {
	s := &streaming{client: c, opt: StreamOptions{CacheDir: dir, KeepDir: keep}}
	s.opt.Cache = testtool.Must(cache.Open(dir, cache.Options{}))(t)
	t.Cleanup(func() { require.NoError(t, s.opt.Cache.Close()) })
	return s
}

func (s *streaming) open(t testing.TB, ref transport.Reference) *Stream {
	st := testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
	t.Cleanup(func() { require.NoError(t, st.Close()) })
	return st
}

func (s *streaming) disk(t testing.TB, st *Stream, name string) *image.Image {
	img := testtool.Must(st.Open(t.Context(), name, image.Options{}))(t)
	t.Cleanup(func() { require.NoError(t, img.Close()) })
	return img
}

// wrongRead reads while the registry sends wrong bytes, until the cache has refused some. The read
// waits for right ones as long as its context lasts.
func (s *streaming) wrongRead(t testing.TB, img *image.Image, p []byte, off int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := testtool.Go(func() error { return testtool.Err(img.ReadAt(ctx, p, off)) })
	testtool.Within(t, 5*time.Minute, func() bool { return s.opt.Cache.Stats().Wrong > 0 })
	cancel()
	require.ErrorIs(t, <-ended, disk.ErrNotNow)
}

func contentOf(t testing.TB, img *image.Image) []byte {
	return readAt(t, img, 0, int(img.Size()))
}

func namesOfDisks(disks []StreamDisk) (names []string) {
	for _, d := range disks {
		names = append(names, d.Name)
	}
	return names
}

// TestStream reads every disk of an image that push has made, and again when the registry is gone.
func TestStream(t *testing.T) {
	m := newMemory(t)
	_, files, contents := diskFiles(t)
	contents["a.qcow2"] = contents["a.raw"]
	pushes(t, m.client(t), files, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})
	dir, keep := t.TempDir(), filepath.Join(t.TempDir(), "keep")
	m.requests("", "")

	first := newStreaming(t, m.client(t), dir, keep)
	st := first.open(t, m.ref(t, "vm/a:1"))
	require.Equal(t, 2, m.requests("GET", "/manifests/"), "that of the tag, and the platform's")
	disks := st.Disks()
	require.Len(t, disks, len(files))
	for _, d := range disks {
		require.Nil(t, d.Digests)
		img := first.disk(t, st, d.Name)
		require.Equal(t, transport.Reads, img.Parallel())
		require.True(t, bytes.Equal(contents[d.Name], contentOf(t, img)), d.Name)
	}
	before := first.opt.Cache.Stats()
	require.Zero(t, before.Wrong)

	// Without the registry: the tag is known, and so is all data that was read.
	m.setFault(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	again := newStreaming(t, m.client(t), dir, keep)
	st2 := again.open(t, m.ref(t, "vm/a:1"))
	requireSameDigests(t, st, st2)
	for _, d := range st2.Disks() {
		require.NotEmpty(t, d.Digests)
		img := again.disk(t, st2, d.Name)
		require.Equal(t, d.Digests[0], img.Unhashed()[0].Digest)
		require.True(t, bytes.Equal(contents[d.Name], contentOf(t, img)), d.Name)
	}
	require.Zero(t, again.opt.Cache.Stats().Fetched)

	// A tag that has moved still names the first image, and the new one for a daemon that has
	// nothing yet.
	m.setFault(nil)
	other := filepath.Join(t.TempDir(), "other.raw")
	require.NoError(t, os.WriteFile(other, noise(9, 1<<20), 0o644))
	pushes(t, m.client(t), []string{other}, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})
	st3 := newStreaming(t, m.client(t), dir, keep).open(t, m.ref(t, "vm/a:1"))
	requireSameDigests(t, st, st3)
	st4 := newStreaming(t, m.client(t), dir, t.TempDir()).open(t, m.ref(t, "vm/a:1"))
	require.Equal(t, []string{"other.raw"}, namesOfDisks(st4.Disks()))
}

func (m *memory) setFault(f func(w http.ResponseWriter, r *http.Request) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = f
}

// oneDisk pushes a raw disk, and opens it with a cache that has only its ends.
func oneDisk(t testing.TB, m *memory, size int, opt transport.Options) (*streaming, *image.Image,
	[]byte) {
	content := noise(40, size)
	file := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(file, content, 0o644))
	pushes(t, m.client(t), []string{file}, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})
	opt.Insecure = []string{m.host}
	s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
	return s, s.disk(t, s.open(t, m.ref(t, "vm/a:1")), "a.raw"), content
}

// TestStreamWaits takes the registry away halfway: reads wait, end with their contexts, and go on
// when it is back, whatever it answered meanwhile.
func TestStreamWaits(t *testing.T) {
	for what, answer := range map[string]func(w http.ResponseWriter){
		"503":     func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) },
		"404":     func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
		"403":     func(w http.ResponseWriter) { w.WriteHeader(http.StatusForbidden) },
		"garbage": func(w http.ResponseWriter) { _, _ = w.Write([]byte("<html>")) },
		"cut":     func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
		"429": func(w http.ResponseWriter) {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
		},
	} {
		t.Run(what, func(t *testing.T) {
			m := newMemory(t)
			var warned atomic.Int64
			_, img, content := oneDisk(t, m, 4<<20, transport.Options{Timeout: time.Second,
				Warn: func(string) { warned.Add(1) }})
			var asked atomic.Int64
			m.setFault(func(w http.ResponseWriter, r *http.Request) bool {
				asked.Add(1)
				answer(w)
				return true
			})
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			p := make([]byte, 4096)
			require.ErrorIs(t, testtool.Err(img.ReadAt(ctx, p, 1<<20)), disk.ErrNotNow)
			done := testtool.Go(func() error {
				return testtool.Err(img.ReadAt(t.Context(), p, 2<<20))
			})
			testtool.Eventually(t, func() bool { return asked.Load() > 2 })
			select {
			case err := <-done:
				require.Fail(t, "the read did not wait", "%v", err)
			default:
			}
			m.setFault(nil)
			require.NoError(t, <-done)
			require.True(t, bytes.Equal(content[2<<20:2<<20+4096], p))
			require.Positive(t, warned.Load())
		})
	}
}

// TestStreamBesideASilentRegistry: while a registry takes requests and sends nothing, the disks of
// another one are read.
func TestStreamBesideASilentRegistry(t *testing.T) {
	silent, other := newMemory(t), newMemory(t)
	s := newStreaming(t, newClient(t, transport.Options{
		Insecure: []string{silent.host, other.host}}), t.TempDir(), t.TempDir())
	var disks []*image.Image
	for i, m := range []*memory{silent, other} {
		pushed(t, m, "a.raw", noise(52+uint64(i), 16<<20), PushOptions{})
		disks = append(disks, s.disk(t, s.open(t, m.ref(t, "vm/a:1")), "a.raw"))
	}
	var asked atomic.Int64
	silent.setFault(func(_ http.ResponseWriter, r *http.Request) bool {
		asked.Add(1)
		<-r.Context().Done()
		return true
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var waiting sync.WaitGroup
	for i := range int64(40) {
		waiting.Go(func() { _, _ = disks[0].ReadAt(ctx, make([]byte, 4096), 1<<20+i*indexChunk) })
	}
	defer waiting.Wait()
	defer cancel()
	testtool.Eventually(t, func() bool { return asked.Load() == transport.Reads })
	read := testtool.Go(func() error {
		return testtool.Err(disks[1].ReadAt(ctx, make([]byte, 4<<20), 4<<20))
	})
	require.NoError(t, testtool.Await(t, read, "the other registry is not asked"))
}

// TestStreamGivesUpOnce: a first start whose registry has no time does not wait for it twice.
func TestStreamGivesUpOnce(t *testing.T) {
	m := newMemory(t)
	oneDisk(t, m, 1<<20, transport.Options{})
	var asked atomic.Int64
	m.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		away := strings.Contains(r.URL.Path, "/blobs/")
		if away {
			asked.Add(1)
			w.Header().Set("Retry-After", "9999")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return away
	})
	s := newStreaming(t, m.client(t), t.TempDir(), t.TempDir())
	_, err := s.client.Stream(t.Context(), m.ref(t, "vm/a:1"), s.opt)
	require.ErrorContains(t, err, "given up")
	require.EqualValues(t, 1, asked.Load())
}

// TestStreamWrongBytes has the registry send wrong bytes for a while. None of them is served; each
// is counted and fetched again.
func TestStreamWrongBytes(t *testing.T) {
	m := newMemory(t)
	s, img, content := oneDisk(t, m, 8<<20, transport.Options{})
	var lies atomic.Int64
	lies.Store(40)
	m.mu.Lock()
	honest := m.handler
	m.mu.Unlock()
	m.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") || lies.Add(-1) < 0 {
			return false
		}
		honest.ServeHTTP(&flipping{ResponseWriter: w}, r)
		return true
	})
	require.True(t, bytes.Equal(content, contentOf(t, img)))
	require.Equal(t, int64(40), s.opt.Cache.Stats().Wrong)
}

// flipping flips a bit of the passing data.
type flipping struct {
	http.ResponseWriter
	once sync.Once
}

func (f *flipping) Write(p []byte) (int, error) {
	p = bytes.Clone(p)
	f.once.Do(func() { p[len(p)/2] ^= 1 })
	return f.ResponseWriter.Write(p)
}

func (f *flipping) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{f}, r)
}

// TestStreamReadsAhead: if reads are in order, more is fetched than was asked for; otherwise it is
// not.
func TestStreamReadsAhead(t *testing.T) {
	m := newMemory(t)
	s, img, _ := oneDisk(t, m, 16<<20, transport.Options{})
	fetched := func() int64 { return s.opt.Cache.Stats().Fetched }
	before, p := fetched(), make([]byte, 4096)
	at := func(chunk int64) {
		require.NoError(t, testtool.Err(img.ReadAt(t.Context(), p, chunk*indexChunk+4096)))
	}
	for _, chunk := range []int64{50, 40, 30, 20} {
		at(chunk)
	}
	require.Equal(t, before+4, fetched())
	for _, chunk := range []int64{51, 52} { // the next ones, but not where a read has ended
		at(chunk)
	}
	require.Equal(t, before+6, fetched())
	for off := int64(11*indexChunk - 4096); off < 11*indexChunk+4096; off += 4096 {
		_, err := img.ReadAt(t.Context(), p, off) // two ends of a short file
		require.NoError(t, err)
	}
	require.Equal(t, before+8, fetched())
	p = make([]byte, indexChunk)
	for chunk := int64(5); chunk < 8; chunk++ {
		at(chunk)
	}
	testtool.Eventually(t, func() bool { return fetched() >= before+8+4+1 })
	p = p[:4096]
	for off := int64(34*indexChunk - 4096); off < 34*indexChunk+indexChunk/4; off += 4096 {
		require.NoError(t, testtool.Err(img.ReadAt(t.Context(), p, off)))
	}
	testtool.Eventually(t, func() bool {
		_, err := img.ReadAt(ended(t), p, 35*indexChunk)
		return err == nil
	}, "the chunk after the one that is read in order")
}

// TestStreamShared has two daemons read the same image with one cache: each chunk is fetched once.
func TestStreamShared(t *testing.T) {
	m := newMemory(t)
	s, img, content := oneDisk(t, m, 8<<20, transport.Options{})
	other := newStreaming(t, s.client, s.opt.CacheDir, t.TempDir())
	img2 := other.disk(t, other.open(t, m.ref(t, "vm/a:1")), "a.raw")
	var both sync.WaitGroup
	for _, one := range []*image.Image{img, img2} {
		both.Go(func() {
			for off := int64(0); off < one.Size(); off += 64 << 10 {
				p := make([]byte, 64<<10)
				_, err := one.ReadAt(t.Context(), p, off)
				if err != nil || !bytes.Equal(content[off:off+int64(len(p))], p) {
					t.Errorf("at %d: %v", off, err)
				}
			}
		})
	}
	both.Wait()
	require.Equal(t, int64(8<<20/indexChunk)+1, // and the index
		s.opt.Cache.Stats().Fetched+other.opt.Cache.Stats().Fetched)
}

// TestStreamWrongLayer refuses a layer with another digest, and leaves nothing of it.
func TestStreamWrongLayer(t *testing.T) {
	l := newLying(t)
	layer := tarOf(t, tarFile{Name: "disk/a.img", Content: noise(50, 1<<20)})
	desc := l.Image(t, layer)
	l.Tags["1"] = desc
	l.Store[digestOf(layer)] = append(bytes.Clone(layer[:len(layer)-1]), 1)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	_, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
	var wrong *transport.DigestError
	require.ErrorAs(t, err, &wrong)
	files := testtool.Must(filepath.Glob(filepath.Join(s.opt.CacheDir, fetchedDir, "*", "*")))(t)
	require.Empty(t, files)
}

// TestStreamWrongIndex: an index that came wrong does not stay in the cache. The next disk of the
// image fetches it once, and the one after that not at all. One that was damaged beside a disk is
// kept anew.
func TestStreamWrongIndex(t *testing.T) {
	m := newMemory(t)
	pushed(t, m, "a.raw", noise(51, 1<<20), PushOptions{})
	r := resolves(t, m.client(t), m.ref(t, "vm/a:1"))
	desc := r.Manifest.Layers[0]
	var asked atomic.Int64
	m.mu.Lock()
	m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, desc.Digest.String()) || asked.Add(1) > 1 {
			return false
		}
		_, err := w.Write(make([]byte, desc.Size))
		return assert.NoError(t, err)
	}
	m.mu.Unlock()
	s := newStreaming(t, m.client(t), t.TempDir(), "")
	for _, want := range []int64{2, 3, 3} {
		s.opt.KeepDir = t.TempDir()
		s.open(t, m.ref(t, "vm/a:1"))
		require.Equal(t, want, asked.Load())
	}
	kept := filepath.Join(s.opt.KeepDir, keptName(desc.Digest.String()))
	content := bytesOf(t, kept)
	require.NoError(t, os.WriteFile(kept, make([]byte, len(content)), 0o600))
	s.disk(t, s.open(t, m.ref(t, "vm/a:1")), "a.raw")
	require.Equal(t, int64(3), asked.Load(), "it is in the cache")
	require.True(t, bytes.Equal(content, bytesOf(t, kept)))
}

// TestStreamOpensBesideAFetch: while one disk waits for the registry, others open, and the stream
// tells about itself.
func TestStreamOpensBesideAFetch(t *testing.T) {
	w := tableOf(t, registrytest.Zstd, 256<<10,
		tarFile{Name: "disk/a.img", Content: noise(90, 1<<20)},
		tarFile{Name: "disk/b.img", Content: noise(91, 1<<20)})
	l, _ := withTable(t, w, w.Entries)
	ref, keep := l.ref(t, "vm/a:1"), t.TempDir()
	client := newClient(t, l.options())
	require.NoError(t, newStreaming(t, client, t.TempDir(), keep).open(t, ref).Close())

	s := newStreaming(t, client, t.TempDir(), keep)
	st := s.open(t, ref)
	waits, goes := make(chan struct{}), make(chan struct{})
	l.Mu.Lock()
	l.Faults = []fault{func(http.ResponseWriter, *http.Request, []byte) bool {
		close(waits)
		<-goes
		return false
	}}
	l.Mu.Unlock()
	opened := testtool.Go(func() error {
		img, err := st.Open(t.Context(), "a.img", image.Options{})
		if err == nil {
			err = img.Close()
		}
		return err
	})
	<-waits
	assert.Len(t, st.Disks(), 2)
	digest, _ := st.Digests()
	assert.NotEmpty(t, digest)
	assert.Nil(t, st.Booted("b.img"))
	img, err := st.Open(t.Context(), "b.img", image.Options{})
	if assert.NoError(t, err) {
		assert.NoError(t, img.Close())
	}
	close(goes)
	require.NoError(t, <-opened)
}

// requireSameDigests requires that two streams are of the same image.
func requireSameDigests(t *testing.T, a, b *Stream) {
	t.Helper()
	digest, platform := a.Digests()
	again, of := b.Digests()
	require.Equal(t, []string{digest, platform}, []string{again, of})
	require.NotEmpty(t, digest)
}
