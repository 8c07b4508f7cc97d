package qcow2

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// words is content with text in it, so that it is compressed with codes of its own.
func words(size int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 3))
	dictionary := []string{"disk", "image", "of the", "machine", "cluster", "\n", ", ", "0x",
		"read", "a", "table", "is", "entry", "=", "offset"}
	var b bytes.Buffer
	for b.Len() < size {
		b.WriteString(dictionary[r.IntN(len(dictionary))])
		b.WriteByte(" \t01234abcdeABCDE_"[r.IntN(17)])
	}
	return b.Bytes()[:size]
}

// countedFile counts how often it is read.
type countedFile struct {
	*bytes.Reader
	reads atomic.Int64
}

func (f *countedFile) ReadAt(p []byte, off int64) (int, error) {
	f.reads.Add(1)
	return f.Reader.ReadAt(p, off)
}

// compressedImage is an image of whole compressed clusters of 64 KiB, one behind the other, and its
// content.
func compressedImage(t testing.TB, clusters int, kind uint8) (*Image, *countedFile, []byte) {
	t.Helper()
	im, content := compressedFile(t, clusters, kind)
	file := &countedFile{Reader: bytes.NewReader(im.b)}
	return testtool.Must(Open(bg, near{file}, int64(len(im.b)), Options{}))(t), file, content
}

func compressedFile(t testing.TB, clusters int, kind uint8) (*image, []byte) {
	t.Helper()
	const bits = 16
	im := newImage(bits, uint64(clusters)<<bits, clusters)
	encode := deflated
	if kind == compressionZstd {
		encode = zstandard
		im.zstd()
	}
	content := words(clusters<<bits, 1)
	at := atData<<bits + 1
	for i := range clusters {
		data := encode(t, content[i<<bits:(i+1)<<bits])
		im.compressed(i, at, data)
		at += len(data)
	}
	return im, content
}

func TestSequentialReadsDecodeOnce(t *testing.T) {
	for _, kind := range []uint8{compressionZlib, compressionZstd} {
		im, file, content := compressedImage(t, 20, kind)
		got := make([]byte, len(content))
		before := file.reads.Load()
		for off := 0; off < len(got); off += 4096 {
			require.NoError(t, testtool.Err(im.ReadAt(bg, got[off:off+4096], int64(off))))
		}
		require.True(t, bytes.Equal(content, got))
		require.EqualValues(t, 1+20, file.reads.Load()-before, "the table, and each cluster once")
	}
}

// TestReadsInTheMiddleDecodeToThere counts, by the bytes loaded into the cache, how much of a
// cluster is decoded.
func TestReadsInTheMiddleDecodeToThere(t *testing.T) {
	for _, kind := range []uint8{compressionZlib, compressionZstd} {
		im, _, content := compressedImage(t, 4, kind)
		var loaded []int
		load := func(_ context.Context, p []byte, at uint64) error {
			loaded = append(loaded, len(p))
			return im.loadCluster(bg, p, at)
		}
		im.decoded.init(im.hdr.clusterSize(), decodedCacheBytes, load)
		read := func(off int) {
			p := filetest.Read(t, im, int64(off), 4096)
			require.True(t, bytes.Equal(content[off:][:4096], p), "%d", off)
		}
		for _, off := range []int{20 << 10, 16 << 10, 1<<16 + 60<<10, 2 << 16} {
			read(off)
		}
		part := 24 << 10
		if kind == compressionZstd {
			part = 1 << 16
		}
		require.Equal(t, []int{part, 1 << 16, 1 << 16}, loaded,
			"a part; a part of that again; nearly all; the beginning")
		require.False(t, decodes(im, 20<<10))
		require.Equal(t, kind == compressionZlib, decodes(im, 24<<10))
		loaded = nil
		read(28 << 10)
		read(48 << 10)
		if kind == compressionZlib {
			require.Equal(t, []int{1 << 16}, loaded, "more of it: the whole of it, once")
		} else {
			require.Empty(t, loaded)
		}
		require.False(t, decodes(im, 60<<10))
		require.NoError(t, testtool.Err2(im.sameKind(bg, 0, 1<<16)))
		im.holdsNothing(t)
	}
}

func TestMoreOfABlockThatIsRead(t *testing.T) {
	var c cache
	c.init(8, 64, func(_ context.Context, p []byte, at uint64) error {
		copy(p, "abcdefgh")
		return nil
	})
	first := testtool.Must(c.get(bg, 0, 1, 3))(t)
	require.Equal(t, "abc\x00\x00\x00\x00\x00", string(first.data))
	second := testtool.Must(c.get(bg, 0, 1, 4))(t)
	require.Equal(t, "abcdefgh", string(second.data))
	require.Equal(t, "abc\x00\x00\x00\x00\x00", string(first.data), "what is read does not change")
	first.release()
	second.release()
	third := testtool.Must(c.get(bg, 0, 1, 4))(t)
	require.Equal(t, "abcdefgh", string(third.data))
	fourth := testtool.Must(c.get(bg, 0, 1, 8))(t)
	require.Same(t, third.slot, fourth.slot)
	third.release()
	fourth.release()
}

func TestReadOfManyClusters(t *testing.T) {
	for _, kind := range []uint8{compressionZlib, compressionZstd} {
		im, _, content := compressedImage(t, 40, kind)
		got := filetest.Read(t, im, 0, len(content))
		require.True(t, bytes.Equal(content, got))

		// From the middle of a cluster into the middle of another one.
		require.NoError(t, testtool.Err(im.ReadAt(bg, got[:5<<16], 1000)))
		require.True(t, bytes.Equal(content[1000:][:5<<16], got[:5<<16]))
	}
}

func TestDamagedClusterAmongOthers(t *testing.T) {
	const bits, cs = 16, 1 << 16
	content := words(3*cs, 3)
	im := newImage(bits, 3*cs, 4)
	at := atData << bits
	for i := range 3 {
		data := deflated(t, content[i*cs:(i+1)*cs])
		if i == 1 {
			data[0] |= 6 // the reserved type of block
		}
		im.compressed(i, at, data)
		at += len(data)
	}
	got := im.opened(t)
	p := make([]byte, 3*cs)
	n, err := got.ReadAt(bg, p, 0)
	require.ErrorContains(t, err, "guest offset 65536:")
	require.ErrorAs(t, err, new(*FormatError))
	require.Equal(t, cs, n)
	require.True(t, bytes.Equal(content[:cs], p[:cs]))
	require.NoError(t, testtool.Err(got.ReadAt(bg, p[:cs], 2*cs)))
	require.True(t, bytes.Equal(content[2*cs:], p[:cs]))
}

// TestReadersOfOneBlockLoadItOnce holds a load back until every reader has asked.
func TestReadersOfOneBlockLoadItOnce(t *testing.T) {
	const readers = 8
	var loads atomic.Int64
	begun, goOn := make(chan struct{}), make(chan struct{})
	var c cache
	c.init(8, 64, func(_ context.Context, p []byte, at uint64) error {
		loads.Add(1)
		close(begun)
		<-goOn
		copy(p, "abcdefgh")
		return nil
	})
	s := &c.shards[0]
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			b, err := c.get(bg, 0, 1, 8)
			if err != nil || string(b.data) != "abcdefgh" {
				t.Errorf("%q, %v", b.data, err)
			}
			b.release()
		})
	}
	<-begun
	testtool.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.findLocked(0).pins == readers
	})
	close(goOn)
	wg.Wait()
	require.EqualValues(t, 1, loads.Load())
}

func TestCacheFailuresAndFullShards(t *testing.T) {
	failure := errors.New("no luck")
	fail := true
	loads := 0
	var c cache
	c.init(8, 0, func(_ context.Context, p []byte, at uint64) error {
		loads++
		if fail {
			return failure
		}
		p[0] = byte(at)
		return nil
	})
	require.ErrorIs(t, testtool.Err(c.get(bg, 1, 1, 8)), failure)
	fail = false
	var held []pinned
	for i := range int64(minSlots) {
		held = append(held, testtool.Must(c.get(bg, i, uint64(i), 8))(t))
	}
	// Every slot is being read: one more block is loaded, and not kept.
	for range 2 {
		before := loads
		b := testtool.Must(c.get(bg, 100, 100, 8))(t)
		require.EqualValues(t, 100, b.data[0])
		b.release()
		require.Equal(t, before+1, loads)
	}
	fail = true
	require.ErrorIs(t, testtool.Err(c.get(bg, 100, 100, 8)), failure)
	fail = false
	for i, b := range held {
		require.EqualValues(t, i, b.data[0], "what is read does not change")
		b.release()
	}
	// The least recently used one makes room.
	for _, key := range []int64{0, 2, 3, 100} {
		testtool.Must(c.get(bg, key, uint64(key), 8))(t).release()
	}
	before := loads
	for _, key := range []int64{0, 2, 3, 100} {
		b := testtool.Must(c.get(bg, key, uint64(key), 8))(t)
		require.EqualValues(t, key, b.data[0])
		b.release()
	}
	require.Equal(t, before, loads)
}

// However many readers there are, there is memory only for as many blocks as slots and processors,
// even after failures, and every reader is served.
func TestCacheBoundsWhatIsLoadedAside(t *testing.T) {
	const readers = 64
	failure := errors.New("no luck")
	var now, most atomic.Int64
	var c cache
	c.init(8, 0, func(_ context.Context, p []byte, at uint64) error {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		time.Sleep(100 * time.Microsecond)
		if at%3 == 0 {
			return failure
		}
		p[0] = byte(at)
		return nil
	})
	var wg sync.WaitGroup
	for i := range uint64(readers) {
		wg.Go(func() {
			for j := range uint64(20) {
				at := (i*20 + j) % 250
				b, err := c.get(bg, int64(at), at, 8)
				switch {
				case at%3 == 0:
					if !errors.Is(err, failure) {
						t.Errorf("block %d: %v", at, err)
					}
				case err != nil || b.data[0] != byte(at):
					t.Errorf("block %d: %v, %v", at, b.data, err)
				default:
					b.release()
				}
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, most.Load(), int64(minSlots+runtime.GOMAXPROCS(0)))
	require.Empty(t, c.places)
}

// TestParallelReads has more readers than the cache has clusters.
func TestParallelReads(t *testing.T) {
	for _, kind := range []uint8{compressionZlib, compressionZstd} {
		im, _, content := compressedImage(t, 12, kind)
		im.decoded.init(im.hdr.clusterSize(), 0, im.loadCluster)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(9, uint64(i)))
				p := make([]byte, 200<<10)
				for range 30 {
					off := r.IntN(len(content))
					p := p[:min(1+r.IntN(1<<(4+r.IntN(14))), len(content)-off)]
					_, err := im.ReadAt(bg, p, int64(off))
					if err != nil || !bytes.Equal(content[off:off+len(p)], p) {
						t.Errorf("%d bytes at %d: %v", len(p), off, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
}

// A decoder that panics ends the session that asked. Readers that wait for the same cluster, or ask
// for it later, are not delayed.
func TestPanicWhileLoading(t *testing.T) {
	var c cache
	loading, waits := make(chan struct{}), make(chan struct{})
	broken := true
	c.init(512, 0, func(_ context.Context, p []byte, at uint64) error {
		if broken {
			if loading != nil {
				close(loading)
				loading = nil
				<-waits
			}
			panic("a bug")
		}
		return nil
	})
	begun := loading
	first := make(chan any, 1)
	go func() {
		defer func() { first <- recover() }()
		_, _ = c.get(bg, 1, 0, 512)
	}()
	<-begun
	second := testtool.Go(func() error { return testtool.Err(c.get(bg, 1, 0, 512)) })
	s := &c.shards[1%len(c.shards)]
	testtool.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		b := s.findLocked(1)
		return b != nil && b.pins == 2
	})
	close(waits)
	require.Equal(t, "a bug", <-first)
	require.ErrorIs(t, <-second, errNotLoaded)
	for range runtime.GOMAXPROCS(0) + 1 {
		require.Panics(t, func() { _, _ = c.loadAside(bg, 0) })
	}
	broken = false
	for range 2 {
		testtool.Must(c.get(bg, 1, 0, 512))(t).release()
	}
	testtool.Must(c.loadAside(bg, 0))(t).release()
}
