package instance

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// BenchmarkOverlay reads what still lies in an image of this machine, and writes parts of blocks of
// it.
func BenchmarkOverlay(b *testing.B) {
	const size = 64 << 20
	path := filetest.Put(b, b.TempDir(), "a.raw", filetest.Sample(size, 9), 0)
	open := func(b *testing.B) *Instance {
		inst, err := Open(b.Context(), openGood(b, path),
			Options{Mode: CopyOnWrite, WorkDir: b.TempDir()})
		require.NoError(b, err)
		b.Cleanup(func() { inst.Close() })
		inst.copies.done.Wait()
		return inst
	}
	b.Run("read 4K", func(b *testing.B) {
		inst := open(b)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			p := make([]byte, 4096)
			r := rand.New(rand.NewPCG(rand.Uint64(), 0))
			for pb.Next() {
				if _, err := inst.ReadAt(p, r.Int64N(size/4096)*4096); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
	b.Run("write 512", func(b *testing.B) {
		var inst *Instance
		p := make([]byte, 512)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if i%(size/4096) == 0 {
				b.StopTimer()
				inst = open(b)
				b.StartTimer()
			}
			if _, err := inst.WriteAt(p, int64(i%(size/4096))*4096+512); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkClone copies images of this machine that are in memory.
func BenchmarkClone(b *testing.B) {
	const size = 256 << 20
	dir := b.TempDir()
	filetest.Put(b, dir, "a.raw", filetest.Sample(size, 9), 0)
	filetest.QemuImg(b, dir, "convert", "-c", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2")
	for _, name := range []string{"a.raw", "a.qcow2"} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				img := openGood(b, filepath.Join(dir, name))
				inst, err := Open(b.Context(), img, Options{WorkDir: b.TempDir()})
				require.NoError(b, err)
				inst.copies.done.Wait()
				require.NoError(b, inst.Close())
			}
		})
	}
}
