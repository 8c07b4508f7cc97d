package qcow2

import (
	"math/rand/v2"
	"testing"
)

func BenchmarkRead(b *testing.B) {
	for _, kind := range []uint8{compressionZlib, compressionZstd} {
		im, _, content := compressedImage(b, 192, kind)
		b.Run(im.Info().Compression+"/sequential 4 KiB", func(b *testing.B) {
			p := make([]byte, 4096)
			b.SetBytes(4096)
			b.ReportAllocs()
			off := 0
			for b.Loop() {
				if _, err := im.ReadAt(bg, p, int64(off)); err != nil {
					b.Fatal(err)
				}
				off = (off + 4096) % len(content)
			}
		})
		b.Run(im.Info().Compression+"/random 4 KiB", func(b *testing.B) {
			b.SetBytes(4096)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				p := make([]byte, 4096)
				r := rand.New(rand.NewPCG(rand.Uint64(), 0))
				for pb.Next() {
					off := int64(r.IntN(len(content)/4096)) * 4096
					if _, err := im.ReadAt(bg, p, off); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
		b.Run(im.Info().Compression+"/sequential 1 MiB", func(b *testing.B) {
			p := make([]byte, 1<<20)
			b.SetBytes(1 << 20)
			b.ReportAllocs()
			off := 0
			for b.Loop() {
				if _, err := im.ReadAt(bg, p, int64(off)); err != nil {
					b.Fatal(err)
				}
				off = (off + 1<<20) % len(content)
			}
		})
	}
}
