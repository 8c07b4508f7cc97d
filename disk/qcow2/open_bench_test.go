package qcow2

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkOpen validates images with 20 GiB of data in 100 GiB, as qemu-img makes them: what a
// start waits for.
func BenchmarkOpen(b *testing.B) {
	const bits, cs, perTable, tables = 16, 1 << 16, 1 << 13, 44
	for _, packed := range []uint64{0, 20 << 10} { // bytes of a compressed cluster, about
		name := "plain"
		if packed > 0 {
			name = "compressed"
		}
		b.Run(name, func(b *testing.B) {
			im := newImage(bits, 100<<30, tables)
			end := uint64(len(im.b))
			for i := range tables {
				im.put64(atL1<<bits+8*4*i, uint64(atL2+i)<<bits|entryCopied)
				for e := range perTable {
					switch {
					case e%97 == 0: // not stored
					case packed == 0:
						im.put64(im.l2(i*perTable+e), end|entryCopied)
						end += cs
					default:
						length := packed + uint64(e)*7919%packed
						im.put64(im.l2(i*perTable+e),
							entryCompressed|end|((end+length-1)>>9-end>>9)<<(62-(bits-8)))
						end += length
					}
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				_, err := Open(bg, near{hugeFile{im.b}}, int64(end+cs), Options{})
				require.NoError(b, err)
			}
		})
	}
}
