package rawfile

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
)

// privateFile returns a disk over a sparse file of 8 MiB with data at 3 MiB, and the file.
func privateFile(t *testing.T, private bool) (*File, *os.File) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "disk.img"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(8<<20))
	_, err = f.WriteAt(bytes.Repeat([]byte{3}, 4096), 3<<20)
	require.NoError(t, err)
	d, err := Open(f.Name(), Options{Private: private})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, d.Close())
		require.NoError(t, f.Close())
	})
	return d, f
}

// byteAt reads 4 KiB, checks that all bytes are equal, and returns one of them.
func byteAt(t *testing.T, d *File, off int64) byte {
	t.Helper()
	p := bytes.Repeat([]byte{0xee}, 4096)
	n, err := d.ReadAt(t.Context(), p, off)
	require.NoError(t, err)
	require.Equal(t, len(p), n)
	require.Equal(t, bytes.Repeat(p[:1], len(p)), p)
	return p[0]
}

func TestHolesAreNotRead(t *testing.T) {
	for _, private := range []bool{true, false} {
		d, f := privateFile(t, private)
		// The test changes the file behind the disk's back, to see whether the disk asks the file.
		behind := func(off int64) {
			_, err := f.WriteAt(bytes.Repeat([]byte{9}, 4096), off)
			require.NoError(t, err)
		}
		behind(5 << 20)
		behind(3 << 20)
		want := byte(9)
		if private {
			want = 0
		}
		require.Equal(t, want, byteAt(t, d, 5<<20), "a hole when it was opened")
		require.Equal(t, byte(9), byteAt(t, d, 3<<20), "data when it was opened")
	}
}

func TestHolesEndWithAWrite(t *testing.T) {
	d, _ := privateFile(t, true)
	p := bytes.Repeat([]byte{7}, 8192)
	off := int64(6<<20 - 4096) // in two regions
	_, err := d.WriteAt(t.Context(), p, off)
	require.NoError(t, err)
	require.Equal(t, byte(7), byteAt(t, d, off))
	require.Equal(t, byte(7), byteAt(t, d, off+4096))
	require.NoError(t, d.Discard(t.Context(), off, 8192))
	require.Equal(t, byte(0), byteAt(t, d, off))
	_, err = d.WriteAt(t.Context(), p[:4096], off)
	require.NoError(t, err)
	require.Equal(t, byte(7), byteAt(t, d, off))
}

func TestHolesEndWithTheFile(t *testing.T) {
	d, _ := privateFile(t, true)
	p := make([]byte, 4096)
	_, err := d.ReadAt(t.Context(), p, d.Size()-2048)
	require.Error(t, err)
	require.Zero(t, byteAt(t, d, d.Size()-4096))
}

// manyExtents is a disk whose sectors are data and hole in turns.
type manyExtents struct {
	disk.Disk
	size  int64
	asked int
}

func (m *manyExtents) Size() int64 { return m.size }

func (m *manyExtents) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	m.asked++
	return disk.Extent{Length: min(length, 4096), Data: off/4096%2 == 0}, nil
}

func TestHolesOfAFragmentedFile(t *testing.T) {
	d := &manyExtents{size: 1 << 30}
	h := newHoleMap(d)
	require.LessOrEqual(t, d.asked, maxHoleExtents+1)
	require.False(t, h.empty(0, 1))
	require.False(t, h.empty(1<<30-1, 1), "what was not looked at counts as written")
}
