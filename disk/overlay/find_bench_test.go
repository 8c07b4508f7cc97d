package overlay

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"kubevirt.io/disk/disk/disktest"
)

// BenchmarkLayers reads through layers whose storage takes no time, so that looking for the layer
// that has a block is most of it.
func BenchmarkLayers(b *testing.B) {
	const size, blocks = 2 << 30, 2 << 30 / minGranule
	for _, layers := range []int{0, 1, 10} {
		r := rand.New(rand.NewPCG(1, 0))
		top := NewWhole(instant{size}, Options{})
		for range layers {
			m := newBlockMap(blocks)
			for range blocks / 20 {
				block := r.Int64N(blocks)
				_ = m.set(block, block, nil)
			}
			top = newLayer(instant{size}, top, size, m, newMapStore(len(m.pages)), Options{})
		}
		top.Index()
		disk := NewStack(top)
		b.Run(fmt.Sprintf("layers=%d", layers), func(b *testing.B) {
			p := make([]byte, minGranule)
			disktest.Fill(p, r)
			for b.Loop() {
				if _, err := disk.ReadAt(b.Context(), p, r.Int64N(blocks)*minGranule); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
