package rawfile_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/testtool"
)

// sparseFile makes a file of zeros and returns its path.
func sparseFile(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.raw")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.Truncate(path, size))
	return path
}

func TestFileIsADisk(t *testing.T) {
	for name, opt := range map[string]rawfile.Options{"ephemeral": {}, "durable": {Durable: true}} {
		t.Run(name, func(t *testing.T) {
			disktest.Run(t, func(t *testing.T) disk.Disk {
				d := testtool.Must(rawfile.Open(sparseFile(t, 3<<20+512), opt))(t)
				t.Cleanup(func() { d.Close() })
				return d
			})
		})
	}
}

func TestFileReadOnly(t *testing.T) {
	path := sparseFile(t, 1<<20)
	d := testtool.Must(rawfile.Open(path, rawfile.Options{ReadOnly: true, Durable: true}))(t)
	defer d.Close()
	require.ErrorIs(t, testtool.Err(d.WriteAt(t.Context(), make([]byte, 512), 0)), disk.ErrReadOnly)
	require.ErrorIs(t, d.Discard(t.Context(), 0, 512), disk.ErrReadOnly)
	require.ErrorIs(t, d.Zero(t.Context(), 0, 512), disk.ErrReadOnly)
	require.ErrorIs(t, d.Zero(t.Context(), 0, 65536), disk.ErrReadOnly)
	require.NoError(t, d.Flush())
	require.NoError(t, testtool.Err(d.ReadAt(t.Context(), make([]byte, 512), 0)))
}

func TestFileThatBecameShorterIsAMediumError(t *testing.T) {
	path := sparseFile(t, 1<<20)
	d := testtool.Must(rawfile.Open(path, rawfile.Options{}))(t)
	defer d.Close()
	require.NoError(t, os.Truncate(path, 4096))
	_, err := d.ReadAt(t.Context(), make([]byte, 1024), 4096-512)
	var medium *disk.MediumError
	require.ErrorAs(t, err, &medium)
	require.Equal(t, "read", medium.Op)
	require.EqualValues(t, 4096, medium.Off, "only what could not be read")
	require.EqualValues(t, 512, medium.Length)
	require.NoError(t, testtool.Err(d.ReadAt(t.Context(), make([]byte, 512), 0)))

	// A client that copies the disk asks first, and does not read holes.
	e := testtool.Must(d.Extent(t.Context(), 0, 1<<20))(t)
	require.Equal(t, disk.Extent{Length: 4096}, e)
	e = testtool.Must(d.Extent(t.Context(), 4096, 1<<20-4096))(t)
	require.Equal(t, disk.Extent{Length: 1<<20 - 4096, Data: true}, e)
}

func TestOpenFileRefuses(t *testing.T) {
	dir := t.TempDir()
	_, err := rawfile.Open(filepath.Join(dir, "missing"), rawfile.Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = rawfile.Open(sparseFile(t, 513), rawfile.Options{})
	require.ErrorContains(t, err, "513 bytes")
	_, err = rawfile.Open(sparseFile(t, 0), rawfile.Options{})
	require.ErrorContains(t, err, "0 bytes")
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(sparseFile(t, 512), link))
	require.Error(t, testtool.Err(rawfile.Open(link, rawfile.Options{})))
}

func TestFileUsage(t *testing.T) {
	const size = 64 << 20
	d := testtool.Must(rawfile.Open(sparseFile(t, size), rawfile.Options{Durable: true}))(t)
	before := testtool.Must(d.Usage())(t)
	require.Less(t, before.Used, int64(1<<20), "a hole takes nothing")
	require.Positive(t, before.Available)

	require.NoError(t, testtool.Err(d.WriteAt(t.Context(), bytes.Repeat([]byte{7}, 16<<20), 0)))
	require.NoError(t, d.Flush(), "this ends delayed allocation")
	after := testtool.Must(d.Usage())(t)
	require.GreaterOrEqual(t, after.Used, before.Used+16<<20)
	require.Less(t, after.Used, int64(size/2))

	require.NoError(t, d.Discard(t.Context(), 0, 16<<20))
	freed := testtool.Must(d.Usage())(t)
	require.Less(t, freed.Used, after.Used)

	require.NoError(t, d.Close())
	require.ErrorContains(t, testtool.Err(d.Usage()), "disk.raw", "the error names the disk")
}

// TestUsageWhileClosed: the daemon asks for the usage of a disk that it may be closing. The race
// detector looks on.
func TestUsageWhileClosed(t *testing.T) {
	path := sparseFile(t, 1<<20)
	for range 50 {
		d := testtool.Must(rawfile.Open(path, rawfile.Options{Durable: true}))(t)
		asked := testtool.Go(func() error { return testtool.Err(d.Usage()) })
		require.NoError(t, d.Close())
		if err := <-asked; err != nil {
			require.ErrorIs(t, err, fs.ErrClosed, "by that the layers of a disk know to ask again")
		}
	}
}
