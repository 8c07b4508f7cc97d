package registry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// spooled is a disk whose layer has digests of chunks, in a registry that may send no parts.
type spooled struct {
	*lying
	layer   []byte
	content []byte
	client  *Client
	stream  *Stream
	img     *image.Image
	dir     string // of the cache

	mu   sync.Mutex
	told []string // guarded by mu
}

func newSpooled(t *testing.T, size int, opt Options, parts bool, faults ...fault) *spooled {
	s := &spooled{lying: newLying(t), content: noise(77, size), dir: t.TempDir()}
	w := &tocWriter{codec: codecZstd, chunk: 256 << 10}
	w.add(t, tarFile{name: "disk/a.img", content: s.content})
	layer, annotations := w.layer(t, w.entries)
	s.layer = layer
	s.annotated(t, layer, annotations)
	opt.Insecure = []string{s.host()}
	opt.Warn = func(text string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.told = append(s.told, text)
	}
	s.client = newClient(t, opt)
	if opt.Patience > 0 {
		s.client.idle = opt.Patience / 5
	}
	streaming := newStreaming(t, s.client, s.dir, t.TempDir())
	s.noRanges, s.faults = !parts, faults
	s.stream = streaming.open(t, s.ref(t, "vm/a:1"))
	s.img = streaming.disk(t, s.stream, "a.img")
	return s
}

func (s *spooled) toldOf(part string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, text := range s.told {
		if strings.Contains(text, part) {
			n++
		}
	}
	return n
}

// sends makes an answer of everything, which waits for the channel before the byte at.
func (l *lying) sends(at int, wait <-chan struct{}) fault {
	return func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		l.count(w.Write(content[:at]))
		w.(http.Flusher).Flush()
		select {
		case <-wait:
		case <-r.Context().Done():
			return true
		}
		l.count(w.Write(content[at:]))
		return true
	}
}

const toldOnce = "is fetched once"

// TestNoParts: a blob whose registry sends everything where a part is asked for is fetched about
// once, and the log says so once.
func TestNoParts(t *testing.T) {
	s := newSpooled(t, 64<<20, Options{}, false)
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
				_, err := s.img.ReadAt(p, int64(i)*piece)
				if err != nil || !bytes.Equal(p, s.content[i*piece:][:piece]) {
					t.Errorf("piece %d: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	require.Less(t, s.sentSince(), int64(len(s.layer))*3/2)
	require.Equal(t, 1, s.toldOf(toldOnce), "%v", s.told)
	require.Equal(t, 1, s.toldOf(s.host()+" sends all of the blob "+digestOf(s.layer)))
	entries, err := os.ReadDir(s.dir)
	require.NoError(t, err)
	for _, e := range entries {
		require.NotContains(t, e.Name(), ".kubevirt-disk", "the file has no name")
	}
}

// TestNoPartsAtFirst: a proxy that has to fetch the blob itself sends everything once. Parts are
// asked for again, and the whole is given up.
func TestNoPartsAtFirst(t *testing.T) {
	s := newSpooled(t, 64<<20, Options{}, true, (&lying{}).sends(1<<20, nil))
	p := make([]byte, 4096)
	for off := int64(len(s.content)) - 4096; off > 0; off -= 5 << 20 {
		_, err := s.img.ReadAt(p, off)
		require.NoError(t, err)
		require.True(t, bytes.Equal(s.content[off:off+4096], p))
	}
	require.Less(t, s.sentSince(), int64(len(s.layer)/2))
	require.Equal(t, 1, s.toldOf(toldOnce))
	require.Equal(t, 1, s.toldOf("sends parts of the blob"))
	require.Nil(t, s.stream.kept.source.(*repository).spoolOf(s.stream.image.manifest.Layers[0]))
}

// TestNoPartsAndSilence: reads of a blob that is fetched as a whole end in time when the registry
// goes silent, and go on when it sends again. Those of what is here do not wait.
func TestNoPartsAndSilence(t *testing.T) {
	goes := make(chan struct{})
	s := newSpooled(t, 16<<20, Options{Patience: time.Second}, false)
	p := make([]byte, 4096)
	_, err := s.img.ReadAt(p, 0)
	require.NoError(t, err)
	repo := s.stream.kept.source.(*repository)
	layer := s.stream.image.manifest.Layers[0]
	repo.spoolOf(layer).drop()
	s.lying.mu.Lock()
	for range 1000 {
		s.faults = append(s.faults, s.sends(8<<20, goes))
	}
	s.lying.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	far := int64(12 << 20)
	began := time.Now()
	_, err = s.img.ReadAtContext(ctx, p, far)
	require.ErrorIs(t, err, disk.ErrNotNow)
	require.Less(t, time.Since(began), longWait)
	near := int64(6 << 20)
	_, err = s.img.ReadAt(p, near)
	require.NoError(t, err)
	require.True(t, bytes.Equal(s.content[near:near+4096], p))
	b, err := repo.blob(layer)
	require.NoError(t, err)
	began = time.Now()
	_, err = b.ReadAt(t.Context(), p, layer.Size-4096)
	require.ErrorContains(t, err, "nothing came")
	require.Less(t, time.Since(began), longWait)

	close(goes)
	_, err = s.img.ReadAt(p, far)
	require.NoError(t, err)
	require.True(t, bytes.Equal(s.content[far:far+4096], p))
}

// plain is a blob in a registry that sends no parts.
type plain struct {
	*lying
	content []byte
	desc    v1.Descriptor
	repo    *repository
	blob    *blob
}

func newPlain(t *testing.T, opt Options, faults ...fault) *plain {
	s := &plain{lying: newLying(t), content: noise(78, 4<<20)}
	s.desc = s.add(s.content)
	s.faults, s.noRanges = faults, true
	opt.Insecure = []string{s.host()}
	src, err := newClient(t, opt).source(s.ref(t, "vm/a:1"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, src.Close()) })
	s.repo = src.(*repository)
	s.repo.spoolDir = t.TempDir()
	s.blob, err = src.blob(s.desc)
	require.NoError(t, err)
	return s
}

// reads checks a read of the blob.
func (s *plain) reads(t *testing.T, off int64) {
	t.Helper()
	p := make([]byte, 1000)
	require.NoError(t, s.blob.fill(t.Context(), p, off))
	require.Equal(t, s.content[off:off+1000], p)
}

// TestNoPartsAndEnd: the end of a stream ends a fetch as a whole that hangs.
func TestNoPartsAndEnd(t *testing.T) {
	s := newPlain(t, Options{}, (&lying{}).sends(1<<20, nil))
	s.reads(t, 5000)
	began := time.Now()
	require.NoError(t, s.repo.Close())
	require.Less(t, time.Since(began), longWait)
	s.reads(t, 3<<20) // a read that is left over asks for its part
	require.Nil(t, s.repo.spoolOf(s.desc))
}

// TestNoPartsAndReaderEnds: the reader that began gives up, and the answer is kept all the same.
func TestNoPartsAndReaderEnds(t *testing.T) {
	goes := make(chan struct{})
	s := newPlain(t, Options{}, (&lying{}).sends(1<<20, goes))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.blob.fill(ctx, make([]byte, 1000), 2<<20), context.DeadlineExceeded)
	close(goes)
	s.reads(t, 2<<20)
	in := s.blob.verified(t.Context())
	got, err := io.ReadAll(in)
	require.NoError(t, errors.Join(err, in.Close()))
	require.True(t, bytes.Equal(s.content, got))
	require.Nil(t, s.repo.spoolOf(s.desc), "it takes no space any more")
	require.LessOrEqual(t, s.requests("/blobs/"), 2, "one began it, and one asked for a part")
}

// TestNoPartsAndLies: wrong content of a blob that is fetched as a whole is not served, and the
// blob is fetched again, when the whole has another digest.
func TestNoPartsAndLies(t *testing.T) {
	s := newSpooled(t, 8<<20, Options{}, false, func(w http.ResponseWriter, _ *http.Request,
		content []byte) bool {
		_, _ = w.Write(flipped(content, len(content)/2))
		return true
	})
	require.True(t, bytes.Equal(s.content, contentOf(t, s.img)))
}

// TestNoPartsAndWrongPart: the blob is fetched again as soon as a read finds that a part is wrong.
func TestNoPartsAndWrongPart(t *testing.T) {
	s := newPlain(t, Options{}, func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		_, _ = w.Write(flipped(content, 6000)[:10000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	})
	p := make([]byte, 4000)
	check := func() error {
		if !bytes.Equal(s.content[5000:9000], p) {
			return errors.New("wrong")
		}
		return nil
	}
	_, err := s.blob.checked(t.Context(), p, 5000, check)
	require.NoError(t, err)
	require.Error(t, check())
	_, err = s.blob.checked(t.Context(), p, 5000, check)
	require.NoError(t, err)
	require.NoError(t, check())
}

// TestNoPartsAndNoRoom: a blob that cannot be kept is read all the same.
func TestNoPartsAndNoRoom(t *testing.T) {
	told := 0
	s := newPlain(t, Options{Warn: func(text string) {
		if strings.Contains(text, "it cannot be kept") {
			told++
		}
	}})
	s.repo.spoolDir = "/nonexistent"
	for range 3 {
		s.reads(t, 5000)
	}
	require.Equal(t, 1, told)
}
