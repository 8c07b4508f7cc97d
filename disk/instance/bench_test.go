package instance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

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
				if _, err := inst.ReadAt(b.Context(), p, r.Int64N(size/4096)*4096); err != nil {
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
			if _, err := inst.WriteAt(b.Context(), p, int64(i%(size/4096))*4096+512); err != nil {
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

// BenchmarkSnapshots reads and writes a complete disk without snapshots, and with ten of them whose
// layers have a part of it each.
func BenchmarkSnapshots(b *testing.B) {
	const size = 64 << 20
	path := filetest.Put(b, b.TempDir(), "a.raw", filetest.Sample(size, 9), 0)
	for _, snapshots := range []int{0, 10} {
		inst, err := Open(b.Context(), openGood(b, path), Options{WorkDir: b.TempDir()})
		require.NoError(b, err)
		b.Cleanup(func() { inst.Close() })
		inst.copies.done.Wait()
		p := make([]byte, 4096)
		r := rand.New(rand.NewPCG(1, 0))
		for i := range snapshots {
			require.NoError(b, TakeSnapshot(b.Context(), fmt.Sprintf("s%d", i), inst))
			for range size / 4096 / 20 {
				_, err := inst.WriteAt(b.Context(), p, r.Int64N(size/4096)*4096)
				require.NoError(b, err)
			}
		}
		for op, do := range map[string]func(context.Context, []byte, int64) (int, error){
			"read": inst.ReadAt, "write": inst.WriteAt} {
			b.Run(fmt.Sprintf("snapshots=%d/%s 4K", snapshots, op), func(b *testing.B) {
				for b.Loop() {
					if _, err := do(b.Context(), p, r.Int64N(size/4096)*4096); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkTakeSnapshot takes snapshots of a durable disk while a guest writes at full speed, and
// says how long the guest's writes took. Before that it writes as many without snapshots.
func BenchmarkTakeSnapshot(b *testing.B) {
	const size = 256 << 20
	path := filetest.Put(b, b.TempDir(), "a.raw", filetest.Sample(size, 9), 0)
	for _, taking := range []bool{false, true} {
		b.Run(fmt.Sprintf("taking=%v", taking), func(b *testing.B) {
			inst, err := Open(b.Context(), openGood(b, path), Options{PersistentDir: b.TempDir()})
			require.NoError(b, err)
			b.Cleanup(func() { inst.Close() })
			inst.copies.done.Wait()
			var took []time.Duration
			stop := make(chan struct{})
			var guest sync.WaitGroup
			guest.Go(func() {
				p := make([]byte, 4096)
				r := rand.New(rand.NewPCG(1, 0))
				for {
					select {
					case <-stop:
						return
					default:
					}
					begin := time.Now()
					_, err := inst.WriteAt(b.Context(), p, r.Int64N(size/4096)*4096)
					if err != nil {
						b.Error(err)
						return
					}
					took = append(took, time.Since(begin))
				}
			})
			for i := 0; b.Loop(); i++ {
				if !taking {
					require.NoError(b, inst.Flush())
					continue
				}
				require.NoError(b, TakeSnapshot(b.Context(), fmt.Sprintf("s%d", i), inst))
				if i >= 5 {
					require.NoError(b, inst.DeleteSnapshot(b.Context(), fmt.Sprintf("s%d", i-5)))
				}
			}
			close(stop)
			guest.Wait()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "longest-ms")
			b.ReportMetric(float64(took[len(took)*999/1000].Microseconds())/1000, "p99.9-ms")
		})
	}
}
