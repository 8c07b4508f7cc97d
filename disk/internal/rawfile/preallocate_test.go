package rawfile

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestPreallocator checks that a large range is preallocated, still reads as zeros, and does not
// change the file's size.
func TestPreallocator(t *testing.T) {
	const size = 4 << 20
	f := filetest.Sparse(t, size)
	var none *Places
	none.before(0, size)
	guest := true
	p := &Places{file: f, busy: func() bool { return guest }}
	p.before(0, size) // beside a guest
	guest = false
	p.before(0, preallocateFrom-1)
	require.Zero(t, filetest.Allocated(t, f.Name()))
	p.before(size-preallocateFrom, preallocateFrom)
	require.EqualValues(t, preallocateFrom, filetest.Allocated(t, f.Name()))
	p.busy = nil
	p.before(0, preallocateFrom)
	require.EqualValues(t, 2*preallocateFrom, filetest.Allocated(t, f.Name()))
	require.True(t, bytes.Equal(make([]byte, size), filetest.Content(t, f.Name())))

	// If it fails once, it is not tried again.
	read, err := os.Open(f.Name())
	require.NoError(t, err)
	defer read.Close()
	p = &Places{file: read}
	p.before(0, preallocateFrom)
	require.True(t, p.useless.Load())
	p.file = f
	p.before(1<<20, preallocateFrom)
	require.EqualValues(t, 2*preallocateFrom, filetest.Allocated(t, f.Name()))

	other, err := os.Open("/proc/self/status")
	require.NoError(t, err)
	defer other.Close()
	require.Nil(t, NewPlaces(other, nil), "not of ext4")
}

// TestServedWriterGivesPlaces checks that writes to a served disk are preallocated, unless the
// guest is active.
func TestServedWriterGivesPlaces(t *testing.T) {
	d, err := Open(filetest.Sparse(t, 1<<20).Name(), Options{Private: true})
	require.NoError(t, err)
	defer d.Close()
	guest := false
	w, done := d.ServedWriter(func() bool { return guest })
	defer done()
	if NewPlaces(d.File, nil) == nil {
		require.Nil(t, w.Places)
		return
	}
	require.False(t, w.Places.busy())
	guest = true
	require.True(t, w.Places.busy())
}

// placed is a file that checks that each large write finds its range allocated.
type placed struct {
	*os.File
	t     *testing.T
	large int
}

func (p *placed) WriteAt(b []byte, off int64) (int, error) {
	if len(b) >= preallocateFrom {
		p.large++
		require.GreaterOrEqual(p.t, filetest.Allocated(p.t, p.Name()),
			int64(p.large)*preallocateFrom)
	}
	return p.File.WriteAt(b, off)
}

// TestRawWriterPreallocates checks that writes through the page cache are preallocated, and that
// zeros are not.
func TestRawWriterPreallocates(t *testing.T) {
	const size = 3 << 20
	f := &placed{File: filetest.Sparse(t, size), t: t}
	w := NewWriter(f, nil)
	w.Places = &Places{file: f.File}
	content := make([]byte, size)
	for i := range 1 << 20 {
		content[i], content[2<<20+i] = byte(i)|1, byte(i)|2
	}
	written, err := w.Store(content, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2<<20, written)
	require.EqualValues(t, 2<<20, filetest.Allocated(t, f.Name()))
	require.NotZero(t, f.large)
	require.True(t, bytes.Equal(content, filetest.Content(t, f.Name())))
}
