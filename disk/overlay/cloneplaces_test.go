package overlay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
)

// A clone has a preallocator where the file system is one for it, and uses it only while no guest is there.
func TestClonePreallocates(t *testing.T) {
	const size = writerFrom
	d, err := rawfile.Open(filetest.Sparse(t, size).Name(), rawfile.Options{Private: true})
	require.NoError(t, err)
	defer d.Close()
	blocks := newBlockMap(blocksOf(size))
	image := filetest.SimImage{Content: make([]byte, size)}
	over := newDisk(d, image, blocks, newMapStore(len(blocks.pages)), size, Options{})
	h := newHydration(over, CopyOptions{Slots: slots.New(4, slots.Options{}),
		Writer: d.ServedWriter})
	require.NoError(t, h.run(t.Context()))
	places := h.out.(*rawfile.Writer).Places
	if d.NewPlaces(nil) == nil {
		require.Nil(t, places)
		return
	}
	require.NotNil(t, places)
	require.False(t, places.Busy())
	over.watch.touch()
	require.True(t, places.Busy())
}
