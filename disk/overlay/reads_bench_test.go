package overlay

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/testtool"
)

// BenchmarkReadsOfSnapshots reads a disk with ten snapshots and one without, in turn, from files in
// memory. times is how much longer the first one took, by the medians. Each layer has a twentieth
// of the disk, in pieces of that size.
func BenchmarkReadsOfSnapshots(b *testing.B) {
	const size, snapshots = 256 << 20, 10
	for _, piece := range []int64{4 << 10, 256 << 10, 4 << 20} {
		dir, r := b.TempDir(), rand.New(rand.NewPCG(1, 0))
		content := make([]byte, piece)
		disktest.Fill(content, r)
		file := func(name string) (*rawfile.File, *os.File) {
			path := filepath.Join(dir, name)
			f := testtool.Must(os.Create(path))(b)
			require.NoError(b, f.Truncate(size))
			raw := testtool.Must(rawfile.Open(path, rawfile.Options{}))(b)
			b.Cleanup(func() { raw.Close(); f.Close() })
			return raw, f
		}
		whole := func(name string) *Disk {
			raw, f := file(name)
			for off := int64(0); off < size; off += piece {
				require.NoError(b, testtool.Err(f.WriteAt(content, off)))
			}
			return NewWhole(raw, Options{})
		}
		without, top := NewStack(whole("without")), whole("bottom")
		for i := range snapshots {
			raw, f := file(fmt.Sprint(i))
			m := newBlockMap(size / minGranule)
			for range size / piece / 20 {
				off := r.Int64N(size/piece) * piece
				require.NoError(b, testtool.Err(f.WriteAt(content, off)))
				_ = m.set(off/minGranule, (off+piece-1)/minGranule, nil)
			}
			top = newLayer(raw, top, size, m, newMapStore(len(m.pages)), Options{})
		}
		with := NewStack(top)
		for name, length := range map[string]int64{"random 4K": 4 << 10,
			"sequential 256K": 256 << 10} {
			b.Run(fmt.Sprintf("%s, pieces of %dK", name, piece>>10), func(b *testing.B) {
				p := make([]byte, length)
				var took [2][]time.Duration
				read := func(i int, off int64) {
					disk := []*Stack{without, with}[i]
					begin := time.Now()
					if _, err := disk.ReadAt(b.Context(), p, off); err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], time.Since(begin))
				}
				next := int64(0)
				for n := 0; b.Loop(); n++ {
					off := next
					if next = (next + length) % size; length < 256<<10 {
						off = r.Int64N(size/length) * length
					}
					read(n%2, off) // both are the first one in turn
					read(1-n%2, off)
				}
				median := func(all []time.Duration) float64 {
					slices.Sort(all)
					return float64(all[len(all)/2])
				}
				b.ReportMetric(median(took[0]), "without-ns")
				b.ReportMetric(median(took[1]), "with-ns")
				b.ReportMetric(median(took[1])/median(took[0]), "times")
			})
		}
	}
}
