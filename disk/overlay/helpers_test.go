package overlay

import (
	"testing"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// openGood opens a valid image, and closes it at the end of the test.
func openGood(t testing.TB, path string) *image.Image {
	t.Helper()
	img := testtool.Must(image.Open(path, image.Options{}))(t)
	t.Cleanup(func() { img.Close() })
	return img
}

func over(t testing.TB, file File, img Image, opt Options) *Disk {
	t.Helper()
	blocks := newBlockMap(blocksOf(img.Size()))
	maps := newMapStore(len(blocks.pages))
	held := testtool.Must(markHoles(t.Context(), img, blocks, true))(t)
	return newDisk(file, img, blocks, maps, held, opt)
}
