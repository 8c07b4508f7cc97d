package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"kubevirt.io/disk/internal/testtool"
)

const testDigest = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

func TestMain(m *testing.M) {
	if os.Getenv(childDir) != "" {
		child()
		return
	}
	goleak.VerifyTestMain(m)
}

// pattern is the content that the blobs of the tests repeat. Its length and a chunk's have no
// common divisor, so no two chunks are the same.
var pattern = func() []byte {
	p := make([]byte, 1<<20+7)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(p) // never fails
	return p
}()

// fillContent writes the content of a test's blob from off on.
func fillContent(p []byte, off int64) {
	for len(p) > 0 {
		n := copy(p, pattern[off%int64(len(pattern)):])
		p = p[n:]
		off += int64(n)
	}
}

func contentAt(off, length int64) []byte {
	p := make([]byte, length)
	fillContent(p, off)
	return p
}

func verifyContent(chunkSize int64) func(int64, []byte) error {
	return func(chunk int64, p []byte) error {
		if !bytes.Equal(p, contentAt(chunk*chunkSize, int64(len(p)))) {
			return errors.New("the digest is wrong")
		}
		return nil
	}
}

// far returns content and counts the fetches.
type far struct {
	fetches atomic.Int64
	fetch   func(ctx context.Context, p []byte, off int64) error // nil: the content at once
}

func (f *far) Fetch(ctx context.Context, p []byte, off int64) error {
	f.fetches.Add(1)
	if f.fetch != nil {
		return f.fetch(ctx, p, off)
	}
	fillContent(p, off)
	return nil
}

func openCache(t testing.TB, dir string, opt Options) *Cache {
	t.Helper()
	c := testtool.Must(Open(dir, opt))(t)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

const testChunk = 64 << 10

func openBlob(t testing.TB, c *Cache, size int64, f *far) *Blob {
	t.Helper()
	return testtool.Must(c.Blob(BlobOptions{Digest: testDigest, Size: size, ChunkSize: testChunk,
		Fetch: f.Fetch, Verify: verifyContent(testChunk)}))(t)
}

func requireRead(t testing.TB, b *Blob, off, length int64) {
	t.Helper()
	p := make([]byte, length)
	require.Equal(t, int(length), testtool.Must(b.ReadAt(t.Context(), p, off))(t))
	require.True(t, bytes.Equal(contentAt(off, length), p), "read of %d bytes at %d", length, off)
}

func TestReads(t *testing.T) {
	const size = segmentSize + 3*testChunk + 1000 // two segments, and a short chunk
	f := new(far)
	dir := t.TempDir()
	c := openCache(t, dir, Options{})
	b := openBlob(t, c, size, f)
	require.False(t, b.Has(0, 1))
	requireRead(t, b, 0, 1)
	require.True(t, b.Has(0, testChunk))
	require.False(t, b.Has(0, testChunk+1))
	requireRead(t, b, segmentSize-10, 20)
	requireRead(t, b, size-1001, 1001)
	p := make([]byte, 20)
	n, err := b.ReadAt(t.Context(), p, size-5)
	require.Equal(t, 5, n)
	require.ErrorIs(t, err, io.EOF)
	n, err = b.ReadAt(t.Context(), p, size)
	require.Zero(t, n)
	require.ErrorIs(t, err, io.EOF)
	for range 200 {
		off := rand.Int64N(size)
		requireRead(t, b, off, 1+rand.Int64N(min(size-off, 300<<10)))
	}
	requireRead(t, b, 0, size)
	chunks := int64((size + testChunk - 1) / testChunk)
	require.Equal(t, chunks, f.fetches.Load(), "each chunk is fetched once")
	require.Equal(t, Stats{Fetched: chunks, FetchedBytes: size}, c.Stats())

	again := new(far)
	b = openBlob(t, openCache(t, dir, Options{}), size, again)
	requireRead(t, b, 0, size)
	require.Zero(t, again.fetches.Load(), "nothing is fetched again after a restart")
}

func TestManyReadersFetchOnce(t *testing.T) {
	const size = segmentSize + 5*testChunk
	f := &far{fetch: func(_ context.Context, p []byte, off int64) error {
		time.Sleep(time.Millisecond)
		fillContent(p, off)
		return nil
	}}
	c := openCache(t, t.TempDir(), Options{})
	b := openBlob(t, c, size, f)
	b.Prefetch(0, size)
	var readers sync.WaitGroup
	for range 32 {
		readers.Go(func() {
			for range 100 {
				off := rand.Int64N(size)
				length := 1 + rand.Int64N(min(size-off, 3*testChunk))
				p := make([]byte, length)
				if _, err := b.ReadAt(t.Context(), p, off); err != nil {
					t.Error(err)
				} else if !bytes.Equal(p, contentAt(off, length)) {
					t.Errorf("wrong content at %d", off)
				}
			}
		})
	}
	readers.Wait()
	testtool.Eventually(t, func() bool { return b.Has(0, size) })
	require.Equal(t, int64(size/testChunk), f.fetches.Load())
}

func TestDamagedContentIsFetchedAgain(t *testing.T) {
	for _, test := range []struct {
		name   string
		damage func(t *testing.T, f *os.File)
		verify bool
		count  int64
	}{
		{"a bit of the content", func(t *testing.T, f *os.File) {
			require.NoError(t, testtool.Err(f.WriteAt([]byte{0xff}, chunksAt+testChunk+7)))
		}, false, 1},
		{"content and sum", func(t *testing.T, f *os.File) {
			s := &segment{file: f, checked: make([]atomic.Bool, segmentSize/testChunk)}
			require.NoError(t, s.store(1, make([]byte, testChunk)))
		}, true, 1},
		{"cut short", func(t *testing.T, f *os.File) {
			require.NoError(t, f.Truncate(chunksAt+testChunk+7))
		}, true, 2},
		{"emptied", func(t *testing.T, f *os.File) { require.NoError(t, f.Truncate(0)) }, true, 3},
		{"another header", func(t *testing.T, f *os.File) {
			require.NoError(t, testtool.Err(f.WriteAt([]byte{1}, 7))) // an earlier version
		}, true, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			requireRead(t, openBlob(t, openCache(t, dir, Options{}), 3*testChunk, new(far)), 0,
				3*testChunk)
			files := testtool.Must(filepath.Glob(filepath.Join(dir, version, "*", "*", "0")))(t)
			require.Len(t, files, 1)
			file := testtool.Must(os.OpenFile(files[0], os.O_RDWR, 0))(t)
			test.damage(t, file)
			require.NoError(t, file.Close())
			f := new(far)
			b := openBlob(t, openCache(t, dir, Options{}), 3*testChunk, f)
			if !test.verify {
				b.opt.Verify = nil
			}
			requireRead(t, b, 0, 3*testChunk)
			require.Equal(t, test.count, f.fetches.Load())
		})
	}
}

// TestCutShortBelowAReader truncates a segment from which this process is reading already.
func TestCutShortBelowAReader(t *testing.T) {
	dir := t.TempDir()
	f := new(far)
	b := openBlob(t, openCache(t, dir, Options{}), 3*testChunk, f)
	requireRead(t, b, 0, 3*testChunk)
	files := testtool.Must(filepath.Glob(filepath.Join(dir, version, "*", "*", "0")))(t)
	require.NoError(t, os.Truncate(files[0], chunksAt+100))
	requireRead(t, b, 50, 3*testChunk-50)
	requireRead(t, b, 0, 3*testChunk)
}

func TestWrongContentIsNeverServed(t *testing.T) {
	wrong := atomic.Int64{}
	f := &far{fetch: func(_ context.Context, p []byte, off int64) error {
		fillContent(p, off)
		if wrong.Add(-1) >= 0 {
			p[len(p)/2] ^= 1
		}
		return nil
	}}
	c := openCache(t, t.TempDir(), Options{})
	b := openBlob(t, c, 4*testChunk, f)
	wrong.Store(tries - 1)
	requireRead(t, b, 10, 10)
	require.Equal(t, int64(tries-1), c.Stats().Wrong)
	wrong.Store(tries)
	_, err := b.ReadAt(t.Context(), make([]byte, 10), testChunk)
	require.ErrorContains(t, err, "the digest is wrong")
	requireRead(t, b, testChunk, 10) // an error is not kept
}

func TestErrorsAreNotKept(t *testing.T) {
	fail := errors.New("the registry is gone")
	var broken atomic.Bool
	broken.Store(true)
	f := &far{fetch: func(_ context.Context, p []byte, off int64) error {
		if broken.Load() {
			return fail
		}
		fillContent(p, off)
		return nil
	}}
	b := openBlob(t, openCache(t, t.TempDir(), Options{}), 4*testChunk, f)
	require.ErrorIs(t, testtool.Err(b.ReadAt(t.Context(), make([]byte, 10), 0)), fail)
	broken.Store(false)
	requireRead(t, b, 0, 10)
}

func TestReaderThatGivesUp(t *testing.T) {
	come := make(chan struct{})
	f := &far{fetch: func(ctx context.Context, p []byte, off int64) error {
		select {
		case <-come:
		case <-ctx.Done():
			return ctx.Err()
		}
		fillContent(p, off)
		return nil
	}}
	b := openBlob(t, openCache(t, t.TempDir(), Options{}), 4*testChunk, f)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, testtool.Err(b.ReadAt(ctx, make([]byte, 10), 0)), context.Canceled)
	var other sync.WaitGroup
	other.Go(func() { requireRead(t, b, 5, 10) })
	testtool.Eventually(t, func() bool { return b.waiting(0) == 1 })
	require.ErrorIs(t, testtool.Err(b.ReadAt(ctx, make([]byte, 10), 0)), context.Canceled)
	close(come)
	other.Wait()
	require.Equal(t, int64(1), f.fetches.Load(), "the fetch goes on for others")
}

// TestAbandonedFetch: a fetch that nobody waits for ends, and the next reader begins anew.
func TestAbandonedFetch(t *testing.T) {
	begun, ended := make(chan struct{}, 1), make(chan struct{}, 1)
	var hang atomic.Bool
	hang.Store(true)
	f := &far{fetch: func(ctx context.Context, p []byte, off int64) error {
		if hang.Load() {
			begun <- struct{}{}
			<-ctx.Done()
			ended <- struct{}{}
			return ctx.Err()
		}
		fillContent(p, off)
		return nil
	}}
	b := openBlob(t, openCache(t, t.TempDir(), Options{}), 4*testChunk, f)
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	read := testtool.Go(func() error { return testtool.Err(b.ReadAt(ctx, make([]byte, 10), 0)) })
	<-begun // a fetch that is abandoned before it begins never begins
	giveUp()
	require.ErrorIs(t, <-read, context.Canceled)
	b.mu.Lock()
	c := b.calls[0]
	b.mu.Unlock()
	require.NotNil(t, c)
	b.abandon(0, c) // as after a while
	<-ended
	hang.Store(false)
	requireRead(t, b, 0, 10)
}

func (b *Blob) waiting(chunk int64) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.calls[chunk]; c != nil {
		return c.waiters
	}
	return 0
}

func TestOptionsAreChecked(t *testing.T) {
	_, err := Open(t.TempDir(), Options{Size: MinSize - 1})
	require.ErrorContains(t, err, "want at least")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.ErrorContains(t, testtool.Err(Open(file, Options{})), "cache directory")
	c := openCache(t, t.TempDir(), Options{})
	good := BlobOptions{Digest: testDigest, Size: 1, ChunkSize: testChunk}
	for _, bad := range []func(*BlobOptions){
		func(o *BlobOptions) { o.Digest = "sha256:../../x" },
		func(o *BlobOptions) { o.Digest = "" },
		func(o *BlobOptions) { o.Size = -1 },
		func(o *BlobOptions) { o.ChunkSize = testChunk + 1 },
		func(o *BlobOptions) { o.ChunkSize = MaxChunkSize * 2 },
		func(o *BlobOptions) { o.ChunkSize = 0 },
	} {
		opt := good
		bad(&opt)
		require.Error(t, testtool.Err(c.Blob(opt)), fmt.Sprint(opt))
	}
}

// TestOrder: chunks are fetched once each, in the given order, and no more of them than a part of
// the cache holds.
func TestOrder(t *testing.T) {
	var mu sync.Mutex
	var got []int64
	f := &far{}
	f.fetch = func(_ context.Context, p []byte, off int64) error {
		mu.Lock()
		got = append(got, off/testChunk)
		mu.Unlock()
		fillContent(p, off)
		return nil
	}
	c := openCache(t, t.TempDir(), Options{Size: MinSize})
	b := openBlob(t, c, 4*MinSize, f)
	runs := [][2]int64{{900, 40}, {5, 2}, {900, 1}, {3, 1}}
	<-b.Order(runs)
	require.Len(t, got, 43)
	require.Equal(t, int64(900), runs[0][0], "it is the caller's")
	o := &order{runs: runs, left: 42}
	for i := range 42 {
		chunk, ok := o.next()
		require.True(t, ok)
		want := int64(900 + i)
		if i >= 40 {
			want = int64(5 + i - 40)
		}
		require.Equal(t, want, chunk)
	}
	_, ok := o.next()
	require.False(t, ok, "it may fetch no more")

	before := c.Stats().Fetched
	<-b.Order([][2]int64{{0, 4 * MinSize / testChunk}})
	require.LessOrEqual(t, c.Stats().Fetched-before, int64(MinSize/orderPart/testChunk))
}

// TestOrderGivesWay: while a reader waits, little of an order is fetched beside it, and the rest
// comes when the reader has what it wants.
func TestOrderGivesWay(t *testing.T) {
	const wanted = 500
	var mu sync.Mutex
	started := 0
	hold := make(chan struct{})
	f := &far{}
	f.fetch = func(ctx context.Context, p []byte, off int64) error {
		if off/testChunk == wanted {
			select {
			case <-hold:
			case <-ctx.Done():
				return ctx.Err()
			}
		} else {
			mu.Lock()
			started++
			mu.Unlock()
		}
		fillContent(p, off)
		return nil
	}
	c := openCache(t, t.TempDir(), Options{})
	b := openBlob(t, c, 1000*testChunk, f)
	read := testtool.Go(func() error {
		return testtool.Err(b.ReadAt(t.Context(), make([]byte, 1), wanted*testChunk))
	})
	testtool.Eventually(t, func() bool { return b.turns.wanted.Load() == 1 })
	done := b.Order([][2]int64{{0, 300}})
	testtool.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return started > 0
	})
	close(hold)
	require.NoError(t, <-read)
	<-done
	require.Equal(t, int64(301), c.Stats().Fetched)
}
