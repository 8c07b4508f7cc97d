//go:build !race

package qcow2 // The race detector makes pools forget at random.

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadsDoNotAllocate reads with a cache that has room for a part of the image.
func TestReadsDoNotAllocate(t *testing.T) {
	for _, kind := range []uint8{compressionZlib, compressionZstd} {
		im, _, content := compressedImage(t, 20, kind)
		im.decoded.init(im.hdr.clusterSize(), 0, im.loadCluster)
		p := make([]byte, 1<<20)
		read := func(size int) func() {
			off := 0
			return func() {
				if _, err := im.ReadAt(bg, p[:size], int64(off)); err != nil {
					t.Error(err)
				}
				off = (off + 7<<16 + size) % (len(content) - size)
			}
		}
		for _, size := range []int{4096, 256 << 10, 1 << 20} {
			f := read(size)
			for range 50 { // fill the caches
				f()
			}
			// On a busy machine the collector may empty the pools meanwhile.
			each := testing.AllocsPerRun(100, f)
			for try := 0; try < 20 && each >= 1; try++ {
				each = min(each, testing.AllocsPerRun(100, f))
			}
			require.Less(t, each, 1.0, "%s, %d bytes", im.Info().Compression, size)
		}
	}
}
