package rawfile

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestRegionsGrow: a set that has grown several times keeps the regions from before and after.
func TestRegionsGrow(t *testing.T) {
	const region = 1 << 20
	size := int64(3 * region)
	s := NewRegions(size, region)
	s.Add(region, 1)
	for _, next := range []int64{4, 64, 65, 200, 1000, 1001} {
		before := size
		size = next * region
		s.grow(size)
		require.False(t, s.touches(before, size-before), "the new part is empty")
		s.Add(size-1, 1)
		require.True(t, s.Covers(size-1, 1))
	}
	require.True(t, s.touches(region, 1))
	require.False(t, s.touches(2*region, region))
	s.Add(0, size)
	require.True(t, s.Covers(0, size))
}

// TestGrow: readers and writers go on while a file grows, the new part reads as zeros and can be
// written at once, also past the page cache.
func TestGrow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
	f, err := Open(path, Options{Private: true, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	stop := make(chan struct{})
	var beside sync.WaitGroup
	beside.Go(func() {
		for n := byte(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			at := f.Size() - 4096
			want, got := bytes.Repeat([]byte{n | 1}, 4096), make([]byte, 4096)
			if _, err := f.WriteAt(t.Context(), want, at); err != nil {
				t.Error(err)
				return
			}
			if _, err := f.ReadAt(t.Context(), got, at); err != nil || !bytes.Equal(got, want) {
				t.Error("what was written is not read", err)
				return
			}
		}
	})
	for size := int64(2 << 20); size <= 300<<20; size += 7<<20 + 512 {
		before := f.Size()
		require.NoError(t, f.Grow(size))
		require.Equal(t, size, f.Size())
		require.Equal(t, make([]byte, 8192), filetest.Read(t, f, before, 8192))
	}
	close(stop)
	beside.Wait()
	w, done := f.ServedWriter(func() bool { return false })
	size := f.Size()
	require.NoError(t, f.Grow(size+8<<20))
	_, err = w.Store(bytes.Repeat([]byte{9}, 4<<20), size/(2<<20)*(2<<20)+2<<20)
	require.NoError(t, err)
	done()
	require.Error(t, f.Grow(size), "it never becomes smaller")
	require.Error(t, f.Grow(size+8<<20+100))
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, f.Size(), st.Size())

	readOnly, err := Open(path, Options{ReadOnly: true})
	require.NoError(t, err)
	defer readOnly.Close()
	require.ErrorIs(t, readOnly.Grow(1<<30), disk.ErrReadOnly)
}
