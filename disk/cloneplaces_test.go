package disk

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"kubevirt.io/disk/disk/internal/slots"
)

// A clone has a preallocator where the file system is one for it, and uses it only while no guest is there.
func TestClonePreallocates(t *testing.T) {
	const size = pastCacheFrom
	d, err := OpenFile(sparse(t, size).Name(), FileOptions{Private: true})
	require.NoError(t, err)
	defer d.Close()
	blocks := newBlockMap(blocksOf(size))
	image := simImage{content: make([]byte, size)}
	over := newOverlay(d, image, blocks, newMapStore(len(blocks.pages)), size, overlayOptions{})
	h := newHydration(over, zap.NewNop(), 0, slots.New(4, slots.Options{}))
	require.NoError(t, h.run(t.Context()))
	places := h.out.(*rawWriter).places
	if d.newPlaces(nil) == nil {
		require.Nil(t, places)
		return
	}
	require.NotNil(t, places)
	require.False(t, places.busy())
	over.watch.touch()
	require.True(t, places.busy())
}
