package qcow2_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/qcow2"
)

// nowhere is a file that accepts every write and keeps nothing.
type nowhere struct{}

func (nowhere) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }

// BenchmarkWrite stores 64 MiB of words, structures, noise and zeros, by all processors.
func BenchmarkWrite(b *testing.B) {
	const size = 64 << 20
	r := rand.New(rand.NewPCG(17, 8))
	d := &memoryDisk{size: size, runs: []run{{0, content(r, size)}}}
	for _, c := range compressions {
		b.Run(string(c), func(b *testing.B) {
			b.SetBytes(size)
			b.ReportAllocs()
			stored := int64(0)
			for b.Loop() {
				var err error
				opt := qcow2.WriteOptions{Compression: c}
				stored, err = qcow2.Write(b.Context(), nowhere{}, d, opt)
				require.NoError(b, err)
			}
			b.ReportMetric(float64(stored)*100/size, "%stored")
		})
	}
}
