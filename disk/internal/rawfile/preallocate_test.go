package rawfile

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// A range that is large enough gets its place, and reads as zeros as before, within the file's
// size.
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
	content, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(make([]byte, size), content))

	// Where it does not work, it is not tried again.
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

// What is written into a disk that is served has its place before, unless the guest does something.
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

// placed is a file of which each large write has to find its place allocated.
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

// What is written through the page cache has its place before, and what is zero gets none.
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
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, got))
}
