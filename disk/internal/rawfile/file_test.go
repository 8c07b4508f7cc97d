package rawfile_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/internal/rawfile"
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
				d, err := rawfile.Open(sparseFile(t, 3<<20+512), opt)
				require.NoError(t, err)
				t.Cleanup(func() { d.Close() })
				return d
			})
		})
	}
}

func TestFileReadOnly(t *testing.T) {
	path := sparseFile(t, 1<<20)
	d, err := rawfile.Open(path, rawfile.Options{ReadOnly: true, Durable: true})
	require.NoError(t, err)
	defer d.Close()
	_, err = d.WriteAt(t.Context(), make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrReadOnly)
	require.ErrorIs(t, d.Discard(t.Context(), 0, 512), disk.ErrReadOnly)
	require.ErrorIs(t, d.Zero(t.Context(), 0, 512), disk.ErrReadOnly)
	require.ErrorIs(t, d.Zero(t.Context(), 0, 65536), disk.ErrReadOnly)
	require.NoError(t, d.Flush())
	_, err = d.ReadAt(t.Context(), make([]byte, 512), 0)
	require.NoError(t, err)
}

func TestFileThatBecameShorterIsAMediumError(t *testing.T) {
	path := sparseFile(t, 1<<20)
	d, err := rawfile.Open(path, rawfile.Options{})
	require.NoError(t, err)
	defer d.Close()
	require.NoError(t, os.Truncate(path, 4096))
	_, err = d.ReadAt(t.Context(), make([]byte, 1024), 4096-512)
	var medium *disk.MediumError
	require.ErrorAs(t, err, &medium)
	require.Equal(t, "read", medium.Op)
	require.EqualValues(t, 4096, medium.Off, "only what could not be read")
	require.EqualValues(t, 512, medium.Length)
	_, err = d.ReadAt(t.Context(), make([]byte, 512), 0)
	require.NoError(t, err)

	// A client that copies the disk asks first, and does not read holes.
	e, err := d.Extent(t.Context(), 0, 1<<20)
	require.NoError(t, err)
	require.Equal(t, disk.Extent{Length: 4096}, e)
	e, err = d.Extent(t.Context(), 4096, 1<<20-4096)
	require.NoError(t, err)
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
	_, err = rawfile.Open(link, rawfile.Options{})
	require.Error(t, err)
}

func TestFileUsage(t *testing.T) {
	const size = 64 << 20
	d, err := rawfile.Open(sparseFile(t, size), rawfile.Options{Durable: true})
	require.NoError(t, err)
	before, err := d.Usage()
	require.NoError(t, err)
	require.Less(t, before.Used, int64(1<<20), "a hole takes nothing")
	require.Positive(t, before.Available)

	_, err = d.WriteAt(t.Context(), bytes.Repeat([]byte{7}, 16<<20), 0)
	require.NoError(t, err)
	require.NoError(t, d.Flush(), "this ends delayed allocation")
	after, err := d.Usage()
	require.NoError(t, err)
	require.GreaterOrEqual(t, after.Used, before.Used+16<<20)
	require.Less(t, after.Used, int64(size/2))

	require.NoError(t, d.Discard(t.Context(), 0, 16<<20))
	freed, err := d.Usage()
	require.NoError(t, err)
	require.Less(t, freed.Used, after.Used)

	require.NoError(t, d.Close())
	_, err = d.Usage()
	require.ErrorContains(t, err, "disk.raw", "the error names the disk")
}

// TestUsageWhileClosed: the daemon asks for the usage of a disk that it may be closing. The race
// detector looks on.
func TestUsageWhileClosed(t *testing.T) {
	path := sparseFile(t, 1<<20)
	for range 50 {
		d, err := rawfile.Open(path, rawfile.Options{Durable: true})
		require.NoError(t, err)
		asked := make(chan error)
		go func() {
			_, err := d.Usage()
			asked <- err
		}()
		require.NoError(t, d.Close())
		if err := <-asked; err != nil {
			require.ErrorContains(t, err, "closed file")
		}
	}
}
