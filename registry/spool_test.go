package registry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// spooled is a disk whose layer has digests of chunks, in a registry that may send no parts.
type spooled struct {
	*lying
	layer   []byte
	content []byte
	client  *Client
	stream  *Stream

	streaming *streaming
	img       *image.Image
	dir       string // of the cache
	told      warnings
}

func newSpooled(t *testing.T, size int, opt transport.Options, faults ...fault) *spooled {
	s := &spooled{lying: newLying(t), content: noise(77, size), dir: t.TempDir()}
	w := tableOf(t, registrytest.Zstd, 256<<10, tarFile{Name: "disk/a.img", Content: s.content})
	layer, annotations := w.Layer(t, w.Entries)
	s.layer = layer
	s.Annotated(t, layer, annotations)
	opt.Insecure = []string{s.Host()}
	opt.Warn = s.told.add
	opt.Idle = opt.Timeout / 5
	s.client = newClient(t, opt)
	s.streaming = newStreaming(t, s.client, s.dir, t.TempDir())
	s.NoRanges, s.Faults = true, faults
	s.start(t)
	return s
}

// start serves the disk, with what an earlier start has kept.
func (s *spooled) start(t *testing.T) {
	s.stream = s.streaming.open(t, s.ref(t, "vm/a:1"))
	s.img = s.streaming.disk(t, s.stream, "a.img")
}

// spooling are the spools in a directory: open files without a name.
func spooling(t *testing.T, dir string) (all []string) {
	for _, fd := range namesIn(t, "/proc/self/fd") {
		to, _ := os.Readlink("/proc/self/fd/" + fd)
		if strings.HasPrefix(to, dir+"/") && strings.HasSuffix(to, " (deleted)") {
			all = append(all, "/proc/self/fd/"+fd)
		}
	}
	return all
}

func (s *spooled) toldOf(part string) (n int) {
	for _, text := range s.told.all() {
		if strings.Contains(text, part) {
			n++
		}
	}
	return n
}

const toldOnce = "is fetched once"

// TestNoParts: a blob whose registry sends everything where a part is asked for is fetched about
// once, and the log says so once.
func TestNoParts(t *testing.T) {
	s := newSpooled(t, 64<<20, transport.Options{})
	const piece = 128 << 10
	order := rand.New(rand.NewPCG(1, 2)).Perm(len(s.content) / piece)
	work := make(chan int, len(order))
	for _, i := range order {
		work <- i
	}
	close(work)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			p := make([]byte, piece)
			for i := range work {
				_, err := s.img.ReadAt(t.Context(), p, int64(i)*piece)
				if err != nil || !bytes.Equal(p, s.content[i*piece:][:piece]) {
					t.Errorf("piece %d: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	require.Less(t, s.SentSince(), int64(len(s.layer))*3/2)
	require.Equal(t, 1, s.toldOf(toldOnce), "%v", s.told.all())
	require.Equal(t, 1, s.toldOf(s.Host()+" sends all of the blob "+digestOf(s.layer)))
	for _, name := range namesIn(t, s.dir) {
		require.NotContains(t, name, ".kubevirt-disk", "the file has no name")
	}
}

// TestNoPartsAndSilence: reads of a blob that is fetched as a whole end in time when the registry
// goes silent, and go on when it sends again. Those of what is here do not wait.
func TestNoPartsAndSilence(t *testing.T) {
	goes := make(chan struct{})
	s := newSpooled(t, 16<<20, transport.Options{Timeout: 5 * time.Second})
	p := filetest.Read(t, s.img, 0, 4096)
	require.Len(t, spooling(t, s.dir), 1)
	s.lying.Mu.Lock()
	for range 1000 {
		s.Faults = append(s.Faults, s.Sends(8<<20, goes))
	}
	s.lying.Mu.Unlock()
	s.start(t)
	layer := s.stream.image.Manifest.Layers[0]
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	far := int64(12 << 20)
	require.ErrorIs(t, testtool.Err(s.img.ReadAt(ctx, p, far)), disk.ErrNotNow)
	near := int64(6 << 20)
	require.NoError(t, testtool.Err(s.img.ReadAt(t.Context(), p, near)))
	require.True(t, bytes.Equal(s.content[near:near+4096], p))
	b := testtool.Must(s.stream.kept.Blob(layer))(t)
	_, err := b.ReadAt(t.Context(), p, layer.Size-4096)
	require.ErrorContains(t, err, "nothing came")

	close(goes)
	require.NoError(t, testtool.Err(s.img.ReadAt(t.Context(), p, far)))
	require.True(t, bytes.Equal(s.content[far:far+4096], p))
}

// plain is a blob in a registry that sends no parts.
type plain struct {
	*lying
	content []byte
	desc    v1.Descriptor
	source  transport.Source
	dir     string // of spools
	blob    *transport.Blob
}

func newPlain(t *testing.T, dir string, opt transport.Options, faults ...fault) *plain {
	s := &plain{lying: newLying(t), content: noise(78, 4<<20), dir: dir}
	s.desc = s.Add(s.content)
	s.Faults, s.NoRanges = faults, true
	opt.Insecure = []string{s.Host()}
	s.source = testtool.Must(newClient(t, opt).Source(s.ref(t, "vm/a:1"), s.dir))(t)
	t.Cleanup(func() { require.NoError(t, s.source.Close()) })
	s.blob = testtool.Must(s.source.Blob(s.desc))(t)
	return s
}

// reads checks a read of the blob.
func (s *plain) reads(t *testing.T, off int64) {
	t.Helper()
	p := make([]byte, 1000)
	require.NoError(t, s.blob.Fill(t.Context(), p, off))
	require.Equal(t, s.content[off:off+1000], p)
}

// TestNoPartsAndEnd: the end of a stream ends a fetch as a whole that hangs.
func TestNoPartsAndEnd(t *testing.T) {
	sends := (&registrytest.Lying{}).Sends(1<<20, nil)
	s := newPlain(t, t.TempDir(), transport.Options{Timeout: time.Hour, Idle: time.Hour}, sends,
		sends)
	s.reads(t, 5000)
	require.NoError(t, s.source.Close())
	s.reads(t, 3<<20) // a read that is left over asks for its part
	require.Empty(t, spooling(t, s.dir))
}

// TestNoPartsAndReaderEnds: the reader that began gives up, and the blob is fetched all the same.
func TestNoPartsAndReaderEnds(t *testing.T) {
	goes := make(chan struct{})
	sends := (&registrytest.Lying{}).Sends(1<<20, goes)
	s := newPlain(t, t.TempDir(), transport.Options{}, sends, sends)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.blob.Fill(ctx, make([]byte, 1000), 2<<20), context.DeadlineExceeded)
	close(goes)
	s.reads(t, 2<<20)
	in := s.blob.Verified(t.Context())
	got, err := io.ReadAll(in)
	require.NoError(t, errors.Join(err, in.Close()))
	require.True(t, bytes.Equal(s.content, got))
	require.Empty(t, spooling(t, s.dir), "it takes no space any more")
	require.Equal(t, 2, s.Requests("/blobs/"), "for a part, and for the whole")
}

// TestNoPartsAndLies: wrong content of a blob that is fetched as a whole is not served, and the
// blob is fetched again.
func TestNoPartsAndLies(t *testing.T) {
	lies := func(w http.ResponseWriter, _ *http.Request, content []byte) bool {
		_, _ = w.Write(flipped(content, len(content)/2))
		return true
	}
	s := newSpooled(t, 8<<20, transport.Options{}, lies, lies)
	require.True(t, bytes.Equal(s.content, contentOf(t, s.img)))
	require.Positive(t, s.streaming.opt.Cache.Stats().Wrong)
}

// TestNoPartsAndWrongPart: the blob is fetched again as soon as a read finds that a part is wrong.
func TestNoPartsAndWrongPart(t *testing.T) {
	lies := func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		_, _ = w.Write(flipped(content, 6000)[:10000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	}
	s := newPlain(t, t.TempDir(), transport.Options{}, lies, lies)
	p := make([]byte, 4000)
	check := func() error {
		if !bytes.Equal(s.content[5000:9000], p) {
			return errors.New("wrong")
		}
		return nil
	}
	require.NoError(t, s.blob.FillChecked(t.Context(), p, 5000, check))
	require.Error(t, check())
	require.NoError(t, s.blob.FillChecked(t.Context(), p, 5000, check))
	require.NoError(t, check())
}

// TestPartsAndErrors: few errors of a registry are no reason to fetch everything, and not even many
// are if it has sent a part.
func TestPartsAndErrors(t *testing.T) {
	m := newMemory(t)
	content := noise(78, 16<<20)
	pushed(t, m, "a.raw", content, PushOptions{})
	var told warnings
	opt := transport.Options{Insecure: []string{m.host}, Warn: told.add}
	s := newStreaming(t, newClient(t, opt), t.TempDir(), t.TempDir())
	img := s.disk(t, s.open(t, m.ref(t, "vm/a:1")), "a.raw")
	left := 0
	m.fault = func(w http.ResponseWriter, _ *http.Request) bool {
		if left--; left < 0 {
			return false
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	}
	for at, n := range []int{2, 4} {
		left = n
		require.Equal(t, content[(at+1)<<22:][:4096], readAt(t, img, int64(at+1)<<22, 4096))
	}
	require.NotContains(t, strings.Join(told.all(), "\n"), toldOnce)
}

// TestNoPartsAndNoRoom: a blob that cannot be kept is read all the same: there is no directory, not
// enough room for it, or other data takes the room meanwhile. The log says so once.
func TestNoPartsAndNoRoom(t *testing.T) {
	full, goes := filetest.TinyFS(t, "6m"), make(chan struct{})
	sends := (&registrytest.Lying{}).Sends(1<<20, goes)
	for _, c := range []struct {
		dir, says string
		faults    []fault
	}{
		{"/nonexistent", ", and it cannot be kept", nil},
		{filetest.TinyFS(t, "4m"), "has room for ", nil},
		{full, "cannot be kept any longer", []fault{sends, sends}},
	} {
		var told atomic.Int64
		s := newPlain(t, c.dir, transport.Options{Warn: func(text string) {
			if strings.Contains(text, c.says) {
				told.Add(1)
			}
		}}, c.faults...)
		s.reads(t, 5000)
		if c.dir == full {
			for _, path := range spooling(t, full) { // as if its room could not be taken before
				f := testtool.Must(os.OpenFile(path, os.O_WRONLY, 0))(t)
				require.NoError(t, unix.Fallocate(int(f.Fd()),
					unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 1<<20, 1<<30))
				require.NoError(t, f.Close())
			}
			filetest.Put(t, full, "others", make([]byte, 9<<19), 0)
			close(goes)
		}
		for range 3 {
			s.reads(t, 3<<20)
		}
		require.EqualValues(t, 1, told.Load(), c.says)
	}
}
