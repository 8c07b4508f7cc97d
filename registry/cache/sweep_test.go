package cache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
)

// segmentFiles are the segments of a directory, by their number.
func segmentFiles(t *testing.T, dir string) map[string]os.FileInfo {
	t.Helper()
	names := testtool.Must(filepath.Glob(filepath.Join(dir, version, "*", "*", "*")))(t)
	all := make(map[string]os.FileInfo)
	for _, name := range names {
		all[filepath.Base(name)] = testtool.Must(os.Stat(name))(t)
	}
	return all
}

func TestLeastRecentlyUsedGoes(t *testing.T) {
	const size = 6 * segmentSize
	dir := t.TempDir()
	f := new(far)
	c := openCache(t, dir, Options{})
	b := openBlob(t, c, size, f)
	for n := range int64(6) {
		requireRead(t, b, n*segmentSize, segmentSize/4)
	}
	old := time.Now().Add(-time.Hour)
	for name := range segmentFiles(t, dir) {
		require.NoError(t, os.Chtimes(filepath.Join(dir, b.dir, name), old, old))
	}
	c.touch() // used until now
	for name := range segmentFiles(t, dir) {
		require.NoError(t, os.Chtimes(filepath.Join(dir, b.dir, name), old, old))
	}
	requireRead(t, b, 2*segmentSize, 10)
	requireRead(t, b, 4*segmentSize+testChunk, 10)
	c.touch()
	c.opt.Size = 3 * (segmentSize/4 + headerSize) // room for two
	require.NoError(t, c.shrink())
	left := segmentFiles(t, dir)
	require.Len(t, left, 2)
	require.Contains(t, left, "2")
	require.Contains(t, left, "4")

	before := f.fetches.Load()
	requireRead(t, b, 2*segmentSize, segmentSize/4)
	require.Equal(t, before, f.fetches.Load())
	requireRead(t, b, 0, 10)
	require.Equal(t, before+1, f.fetches.Load(), "what was removed is fetched again")
	require.Contains(t, segmentFiles(t, dir), "0")

	c.opt.Size = 1
	require.NoError(t, c.shrink())
	require.Empty(t, segmentFiles(t, dir))
	requireRead(t, b, 0, size) // its directory is gone
}

// TestRemovalUnderLoad keeps removing segments while others read, in two caches of one directory.
func TestRemovalUnderLoad(t *testing.T) {
	const size = 4 * segmentSize
	dir := t.TempDir()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var all sync.WaitGroup
	for range 2 {
		c := openCache(t, dir, Options{})
		c.opt.Size = 2 * segmentSize
		b := openBlob(t, c, size, new(far))
		all.Go(func() {
			for ctx.Err() == nil {
				c.touch()
				if err := c.shrink(); err != nil {
					t.Error(err)
				}
			}
		})
		for range 4 {
			all.Go(func() {
				for range testtool.Rounds(300, 1500) {
					off := rand.Int64N(size - 3*testChunk)
					p := make([]byte, 1+rand.IntN(2*testChunk))
					if _, err := b.ReadAt(ctx, p, off); err != nil && ctx.Err() == nil {
						t.Error(err)
					} else if err == nil && !bytes.Equal(p, contentAt(off, int64(len(p)))) {
						t.Errorf("wrong content at %d", off)
					}
				}
				stop()
			})
		}
	}
	all.Wait()
}

func TestCacheOnAFullDisk(t *testing.T) {
	testtool.Needs(t, "root (to mount a small file system)", os.Geteuid() == 0)
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	f := new(far)
	c := testtool.Must(Open(dir, Options{}))(t)
	b := openBlob(t, c, segmentSize+10, f)
	for range 2 {
		requireRead(t, b, 0, segmentSize+10)
	}
	require.Positive(t, c.Stats().Unsaved)
	// A guest that reads on, little by little, does not have the same chunk fetched each time.
	before := f.fetches.Load()
	for off := int64(0); off < testChunk; off += 4096 {
		requireRead(t, b, 10*segmentSize/16+off, 4096)
	}
	require.LessOrEqual(t, f.fetches.Load(), before+2)
	require.NoError(t, c.Close())
}

func TestForeignFilesInTheCache(t *testing.T) {
	for _, test := range []struct {
		name string
		put  func(t *testing.T, path string)
	}{
		{"a directory", func(t *testing.T, path string) {
			require.NoError(t, os.Mkdir(path, 0o700))
		}},
		{"a FIFO", func(t *testing.T, path string) {
			require.NoError(t, unix.Mkfifo(path, 0o600))
		}},
		{"a link out of it", func(t *testing.T, path string) {
			require.NoError(t, os.Symlink("/etc/passwd", path))
		}},
		{"another file", func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("x", 3*headerSize)), 0o600))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			b := openBlob(t, openCache(t, dir, Options{}), 3*testChunk, new(far))
			require.NoError(t, os.MkdirAll(filepath.Join(dir, b.dir), 0o700))
			test.put(t, filepath.Join(dir, b.dir, "0"))
			requireRead(t, b, 0, 3*testChunk)
			requireRead(t, b, 0, 3*testChunk)
		})
	}
}

func FuzzSegment(f *testing.F) {
	header := segmentHeader{chunkSize: testChunk, blobSize: 2 * testChunk}
	whole := make([]byte, chunksAt+2*testChunk)
	copy(whole, header.encode())
	f.Add(whole, 0, byte(0))
	f.Add(whole[:headerSize], 8, byte(1))
	f.Add([]byte{}, 0, byte(0))
	f.Fuzz(func(t *testing.T, content []byte, at int, with byte) {
		if at >= 0 && at < len(content) {
			content = bytes.Clone(content)
			content[at] ^= with
		}
		dir := t.TempDir()
		path := filepath.Join(dir, "0")
		require.NoError(t, os.WriteFile(path, content, 0o600))
		root := testtool.Must(osfile.OpenShared(dir, 0o770))(t)
		defer root.Close()
		s := testtool.Must(openSegment(root, "0", header))(t)
		defer s.retire()
		p := make([]byte, testChunk)
		for i := range int64(2) {
			if s.load(i, p) {
				var sum [sumSize]byte
				require.NoError(t, testtool.Err(s.file.ReadAt(sum[:], sumsAt+i*sumSize)))
				require.NotEqual(t, [sumSize]byte{}, sum)
			}
			require.NoError(t, s.store(i, p))
			require.True(t, s.load(i, p))
			require.NoError(t, s.forget(i))
			require.False(t, s.load(i, p))
		}
	})
}

// TestOthersCount: other things in the directory count towards its size. They are removed when they
// were unused for longest, unless they are in use, or cannot be removed or even looked at. Chunks
// keep a part of the size in any case.
func TestOthersCount(t *testing.T) {
	const limit = 4 * segmentSize
	old, inUse := false, 0
	unseen, foreign := errors.New("cannot be looked at"), errors.New("is of another user")
	others := []Other{
		{Name: "foreign", Bytes: limit, Used: time.Now().Add(-3 * time.Hour),
			Remove: func() error { return foreign }},
		{Name: "in use", Bytes: limit, Used: time.Now().Add(-2 * time.Hour),
			Remove: func() error { inUse++; return ErrInUse }},
		{Name: "old", Bytes: limit, Used: time.Now().Add(-time.Hour), Remove: func() error {
			old = true
			return nil
		}},
	}
	c := openCache(t, t.TempDir(), Options{Others: func() ([]Other, error) {
		if old {
			return others[:2], nil
		}
		return others, unseen
	}})
	b := openBlob(t, c, 6*segmentSize, new(far))
	for n := range int64(6) {
		requireRead(t, b, n*segmentSize, segmentSize/2)
	}
	c.opt.Size = limit
	require.ErrorIs(t, c.shrink(), foreign)
	require.True(t, old)
	require.Equal(t, 1, inUse)
	_, chunks := testtool.Must2(c.segments())(t)
	require.LessOrEqual(t, chunks, int64(limit/leastChunks))
	require.Greater(t, chunks, int64(limit/leastChunks-segmentSize))
	require.ErrorIs(t, c.shrink(), foreign, "nothing more is to be had")
}

// TestRemove leaves nothing of a blob in the directory, and keeps nothing of it from then on.
func TestRemove(t *testing.T) {
	dir := t.TempDir()
	c := openCache(t, dir, Options{})
	b := openBlob(t, c, 2*segmentSize, new(far))
	requireRead(t, b, 0, testChunk)
	requireRead(t, b, segmentSize, testChunk)
	require.Len(t, segmentFiles(t, dir), 2)
	require.NoError(t, b.Remove())
	require.Empty(t, segmentFiles(t, dir))
	requireRead(t, b, segmentSize, testChunk)
	require.Empty(t, segmentFiles(t, dir))
	require.NoError(t, b.Remove())
}
