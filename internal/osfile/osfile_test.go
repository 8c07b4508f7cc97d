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
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "file")))(t)
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
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "file")))(t)
	defer func() { require.NoError(t, f.Close()) }()
	for _, at := range []int64{0, part, 3 * part} {
		require.NoError(t, testtool.Err(f.WriteAt(make([]byte, part), at)))
	}
	var x Extents
	check := func(off, length, want int64, wantData bool) {
		t.Helper()
		n, data := testtool.Must2(x.Seek(f, off, length))(t)
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
	root := testtool.Must(os.OpenRoot(dir))(t)
	defer root.Close()
	for name, open := range map[string]func() (*os.File, error){
		"by name": func() (*os.File, error) { return Nameless(dir) },
		"in root": func() (*os.File, error) { return NamelessIn(root) },
	} {
		f := testtool.Must(open())(t, name)
		require.NoError(t, testtool.Err(f.WriteAt([]byte("content"), 3)), name)
		got := make([]byte, 10)
		require.NoError(t, testtool.Err(f.ReadAt(got, 0)), name)
		require.Equal(t, "\x00\x00\x00content", string(got), name)
		require.Empty(t, testtool.Must(os.ReadDir(dir))(t), name)
		require.NoError(t, f.Close())
	}
	require.ErrorIs(t, testtool.Err(Nameless(filepath.Join(dir, "none"))), fs.ErrNotExist)
}
