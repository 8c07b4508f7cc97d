package rawfile

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

func openSparse(t *testing.T, dir string, size int64, opt Options) *File {
	t.Helper()
	f := testtool.Must(Open(filetest.Put(t, dir, "disk.raw", nil, size), opt))(t)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestFailedFlushIsSticky(t *testing.T) {
	f := openSparse(t, t.TempDir(), 1<<20, Options{Durable: true})
	calls := 0
	f.sync = func(int) error {
		calls++
		return map[int]error{1: unix.EINTR, 3: unix.EIO}[calls]
	}
	require.NoError(t, f.Flush())
	require.Equal(t, 2, calls, "an interrupted call is repeated")
	err := f.Flush()
	require.ErrorIs(t, err, disk.ErrFailed)
	require.ErrorIs(t, err, unix.EIO)
	require.ErrorIs(t, f.Flush(), disk.ErrFailed)
	require.Equal(t, 3, calls, "the kernel is not asked again: it would say that all is well")
	require.ErrorIs(t, testtool.Err(f.WriteAt(t.Context(), make([]byte, 512), 0)), disk.ErrFailed)
	require.ErrorIs(t, f.Discard(t.Context(), 0, 4096), disk.ErrFailed)
	require.ErrorIs(t, f.Zero(t.Context(), 0, 512), disk.ErrFailed)
	_, err = f.ReadAt(t.Context(), make([]byte, 512), 0)
	require.NoError(t, err, "it can still be read")
}

// TestFileIsReadAnewAfterAFailedFlush checks that the next process does not find the data of a
// failed flush in the page cache, because the kernel drops it some time later.
func TestFileIsReadAnewAfterAFailedFlush(t *testing.T) {
	for _, cause := range []error{nil, unix.EIO} {
		f := openSparse(t, t.TempDir(), 1<<20, Options{Durable: true})
		f.sync = func(fd int) error {
			require.NoError(t, unix.Fdatasync(fd))
			return cause
		}
		var forgotten []int
		f.forget = func(fd int) error {
			forgotten = append(forgotten, fd)
			return forgetCached(fd)
		}
		filetest.Write(t, f, filetest.Block('w', 4096), 0)
		var want []int
		if err := f.Flush(); cause != nil {
			require.ErrorIs(t, err, cause)
			want = append(want, int(f.File.Fd()))
		} else {
			require.NoError(t, err)
		}
		require.Empty(t, forgotten, "while the file is open, reads still return the last write")
		require.NoError(t, f.Close())
		require.Equal(t, want, forgotten)
	}
}

func TestEphemeralFlushReachesNoStorage(t *testing.T) {
	f := openSparse(t, t.TempDir(), 1<<20, Options{})
	f.sync = func(int) error { t.Error("flushed"); return nil }
	require.NoError(t, f.Flush())
}

func TestFullFileSystem(t *testing.T) {
	f := openSparse(t, filetest.TinyFS(t, "256k"), 1<<20, Options{})
	p := filetest.Block(1, 64<<10)
	var err error
	var off int64
	for ; off < f.Size() && err == nil; off += int64(len(p)) {
		_, err = f.WriteAt(t.Context(), p, off)
	}
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Equal(t, p, filetest.Read(t, f, 0, len(p)))
	_, err = f.WriteAt(t.Context(), filetest.Block(2, 64<<10), 0)
	require.NoError(t, err, "allocated blocks can be written")
	require.NoError(t, f.Discard(t.Context(), 64<<10, 64<<10))
	_, err = f.WriteAt(t.Context(), p[:32<<10], f.Size()-32<<10)
	require.NoError(t, err, "there is space again")
	require.NoError(t, f.Flush())
}

// TestWithoutHoles checks that zeros are written if the file system cannot punch holes.
func TestWithoutHoles(t *testing.T) {
	dir := t.TempDir()
	f := openSparse(t, dir, 1<<20, Options{})
	f.noPunch.Store(true)
	filetest.Write(t, f, filetest.Block(1, 1<<20), 0)
	require.NoError(t, f.Discard(t.Context(), 512, 600<<10))
	require.NoError(t, f.Zero(t.Context(), 800<<10, 8192))
	got := filetest.Read(t, f, 0, 1<<20)
	want := filetest.Block(1, 1<<20)
	clear(want[512 : 512+600<<10])
	clear(want[800<<10 : 808<<10])
	require.Equal(t, want, got)
	require.GreaterOrEqual(t, filetest.Allocated(t, filepath.Join(dir, "disk.raw")), int64(1<<20))
}

func TestDiscardGivesSpaceBack(t *testing.T) {
	dir := t.TempDir()
	f := openSparse(t, dir, 1<<20, Options{})
	for _, give := range []func(ctx context.Context, off, length int64) error{f.Discard,
		f.Zero} {
		filetest.Write(t, f, filetest.Block(1, 1<<20), 0)
		require.NoError(t, give(t.Context(), 0, 1<<20))
		require.Zero(t, filetest.Allocated(t, filepath.Join(dir, "disk.raw")))
		e := testtool.Must(f.Extent(t.Context(), 0, 1<<20))(t)
		require.Equal(t, disk.Extent{Length: 1 << 20}, e)
	}
}

func TestErrorsOfTheFileSystem(t *testing.T) {
	f := openSparse(t, t.TempDir(), 1<<20, Options{})
	for cause, want := range map[error]error{unix.ENOSPC: disk.ErrNoSpace,
		unix.EDQUOT: disk.ErrNoSpace, unix.EFBIG: disk.ErrNoSpace,
		unix.EROFS: disk.ErrReadOnly, unix.EBADF: disk.ErrReadOnly, unix.EPERM: disk.ErrReadOnly} {
		err := f.writeError(0, 512, cause)
		require.ErrorIs(t, err, want)
		require.ErrorIs(t, err, cause)
	}
	var medium *disk.MediumError
	require.ErrorAs(t, f.writeError(512, 1024, unix.EIO), &medium)
	require.Equal(t, disk.MediumError{Op: "write", Off: 512, Length: 1024, Err: unix.EIO}, *medium)
}
