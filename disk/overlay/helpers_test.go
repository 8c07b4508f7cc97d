package overlay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
)

// openGood opens a valid image, and closes it at the end of the test.
func openGood(t testing.TB, path string) *image.Image {
	t.Helper()
	img, err := image.Open(path, image.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { img.Close() })
	return img
}

// over makes a disk over an image, in a new file.
func over(t testing.TB, file File, img Image, opt Options) *Disk {
	t.Helper()
	blocks := newBlockMap(blocksOf(img.Size()))
	maps := newMapStore(len(blocks.pages))
	held, err := markHoles(t.Context(), img, blocks, maps.save)
	require.NoError(t, err)
	return newDisk(file, img, blocks, maps, held, opt)
}
