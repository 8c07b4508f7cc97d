package osfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// TestCallBesideClose checks that a descriptor stays ours until the call on it has ended. Otherwise
// a hole could be punched into a file that has just got the same descriptor.
func TestCallBesideClose(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	closed := make(chan error, 1)
	require.NoError(t, Call(f, func(fd int) error {
		go func() { closed <- f.Close() }()
		testtool.Eventually(t, func() bool {
			return Call(f, func(int) error { return nil }) != nil
		})
		_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		return err
	}))
	require.NoError(t, <-closed)
	require.ErrorIs(t, Call(f, func(int) error { return nil }), os.ErrClosed)
}

// TestExtents checks that the last run of data is remembered until somebody forgets it. Otherwise
// each read of a large file on tmpfs would look at all of its pages.
func TestExtents(t *testing.T) {
	const part = 1 << 20
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	for _, at := range []int64{0, part, 3 * part} {
		_, err := f.WriteAt(make([]byte, part), at)
		require.NoError(t, err)
	}
	var x Extents
	check := func(off, length, want int64, wantData bool) {
		t.Helper()
		n, data, err := x.Seek(f, off, length)
		require.NoError(t, err)
		require.Equal(t, want, n)
		require.Equal(t, wantData, data)
	}
	check(0, 4*part, 2*part, true)
	check(2*part, 2*part, part, false)
	check(2*part, 4096, 4096, false)

	hole := func(off int64) {
		require.NoError(t, Call(f, func(fd int) error {
			const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
			return unix.Fallocate(fd, mode, off, part)
		}))
	}
	hole(part)
	check(part/2, 2*part, 3*part/2, true) // nobody said so
	x.Forget()
	check(part/2, 2*part, part/2, true)
	check(part, 4*part, 2*part, false)
	check(3*part, part, part, true)

	require.NoError(t, f.Truncate(5*part))
	check(4*part, 2*part, part, false)
	check(5*part, part, part, true) // behind the end: a hole there would be zeros in a copy
}

// TestNameless: nothing is left in the directory, and the file can be used.
func TestNameless(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	for name, open := range map[string]func() (*os.File, error){
		"by name": func() (*os.File, error) { return Nameless(dir) },
		"in root": func() (*os.File, error) { return NamelessIn(root) },
	} {
		f, err := open()
		require.NoError(t, err, name)
		_, err = f.WriteAt([]byte("content"), 3)
		require.NoError(t, err, name)
		got := make([]byte, 10)
		_, err = f.ReadAt(got, 0)
		require.NoError(t, err, name)
		require.Equal(t, "\x00\x00\x00content", string(got), name)
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left, name)
		require.NoError(t, f.Close())
	}
	_, err = Nameless(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}
