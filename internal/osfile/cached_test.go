package osfile

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// TestReadCached: what the page cache has is read, what it lacks is not waited for, and a read at
// the file's end is answered as ReadAt does.
func TestReadCached(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	want := bytes.Repeat([]byte("content."), 1<<17)
	require.NoError(t, os.WriteFile(path, want, 0o600))
	f := testtool.Must(os.Open(path))(t)
	defer f.Close()
	got := make([]byte, 8192)
	n := testtool.Must(ReadCached(f, got, 4096))(t)
	require.Equal(t, want[4096:4096+8192], got[:n])
	require.ErrorIs(t, testtool.Err(ReadCached(f, got, int64(len(want))-100)), unix.EAGAIN)
	_, err := ReadCached(f, got, int64(len(want)))
	require.Equal(t, io.EOF, err)
	n = testtool.Must(ReadCached(f, nil, 0))(t)
	require.Zero(t, n)

	require.NoError(t, f.Sync())
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	for off := int64(0); off < int64(len(want)); off += int64(len(got)) {
		// A file system in memory keeps it, so both answers are right.
		if _, err := ReadCached(f, got, off); err != nil {
			require.ErrorIs(t, err, unix.EAGAIN)
			require.NoError(t, testtool.Err(f.ReadAt(got, off)))
		}
		require.Equal(t, want[off:off+int64(len(got))], got)
	}
}
