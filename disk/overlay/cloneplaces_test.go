package overlay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
)

// TestClonePreallocates: the writer of a clone learns whether a guest is active, because allocating
// space would slow the guest down.
func TestClonePreallocates(t *testing.T) {
	const size = writerFrom
	d, err := rawfile.Open(filetest.Sparse(t, size).Name(), rawfile.Options{Private: true})
	require.NoError(t, err)
	defer d.Close()
	blocks := newBlockMap(blocksOf(size))
	image := filetest.SimImage{Content: make([]byte, size)}
	over := newDisk(d, image, blocks, newMapStore(len(blocks.pages)), size, Options{})
	var busy func() bool
	opened, closed := 0, 0
	writer := func(asked func() bool) (*rawfile.Writer, func()) {
		busy, opened = asked, opened+1
		w, done := d.ServedWriter(asked)
		return w, func() { done(); closed++ }
	}
	opt := CopyOptions{Slots: slots.New(4, slots.Options{}), Writer: writer}
	require.NoError(t, over.Copy(t.Context(), opt))
	require.Equal(t, 1, opened)
	require.Equal(t, 1, closed)
	require.False(t, busy())
	over.watch.touch()
	require.True(t, busy())
}
