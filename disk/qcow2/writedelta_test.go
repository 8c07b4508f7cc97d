package qcow2_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// TestWriteDelta writes what is different from a backing file. Zeros hide what is below, clusters
// that are not named are not stored, and qemu-img reads the same disk.
func TestWriteDelta(t *testing.T) {
	testtool.Need(t, "qemu-img")
	const cluster = qcow2.DeltaUnit
	r := rand.New(rand.NewPCG(36, 2))
	for name, test := range map[string]struct {
		size, below int64
		changed     []int64 // clusters
		zeros       map[int64]bool
	}{
		"nothing":     {8 << 20, 8 << 20, nil, nil},
		"one cluster": {8 << 20, 8 << 20, []int64{3}, nil},
		"with gaps":   {8 << 20, 8 << 20, []int64{0, 1, 3, 17, 18, 40, 127}, nil},
		"zeros": {8 << 20, 8 << 20, []int64{0, 1, 2, 9, 10, 11},
			map[int64]bool{1: true, 9: true}},
		"only zeros":    {8 << 20, 8 << 20, []int64{5, 6}, map[int64]bool{5: true, 6: true}},
		"larger":        {8<<20 + 512, 6<<20 + 4096, []int64{95, 96, 97, 128}, nil},
		"smaller":       {6<<20 + 1536, 8 << 20, []int64{2, 96}, nil},
		"in two tables": {600 << 20, 8 << 20, []int64{7, 8300}, map[int64]bool{8300: true}},
	} {
		for _, c := range compressions {
			if test.size > 512<<20 && c == qcow2.CompressionZlib {
				continue // clusters lie where those of zstd do, and it takes long
			}
			t.Run(name+"/"+string(c), func(t *testing.T) {
				dir := t.TempDir()
				old := content(r, int(test.below))
				want := make([]byte, test.size)
				copy(want, old)
				d := &memoryDisk{size: test.size}
				for _, n := range test.changed {
					off := n * cluster
					p := want[off:min(off+cluster, test.size)]
					if clear(p); !test.zeros[n] {
						copy(p, content(r, len(p)))
					}
					d.runs = append(d.runs, run{off, p})
				}
				path := filepath.Join(dir, "top.qcow2")
				top := write(t, d, qcow2.WriteOptions{Compression: c,
					Backing: qcow2.Backing{Name: "below.raw", Format: "raw"}})
				require.NoError(t, os.WriteFile(path, top, 0o644))
				require.NoError(t, os.WriteFile(filepath.Join(dir, "below.raw"), old, 0o644))
				require.NoError(t, os.WriteFile(filepath.Join(dir, "want.raw"), want, 0o644))

				im := testtool.Must(openBytes(t, top))(t)
				info := im.Info()
				require.Equal(t, "below.raw", info.BackingFile)
				require.Equal(t, "raw", info.BackingFormat)
				require.LessOrEqual(t, info.PlainSize+info.CompressedSize,
					int64(len(test.changed)-len(test.zeros))*cluster)
				im.SetBacking(near{bytes.NewReader(old)}, test.below)
				require.True(t, bytes.Equal(want, filetest.Read(t, im, 0, test.size)))

				runTool(t, "qemu-img", "check", "-q", "-f", "qcow2", path)
				runTool(t, "qemu-img", "compare", "-q", "-f", "qcow2", "-F", "raw", path,
					filepath.Join(dir, "want.raw"))
				again := write(t, d, qcow2.WriteOptions{Compression: c, Workers: 1,
					Backing: qcow2.Backing{Name: "below.raw", Format: "raw"}})
				require.True(t, bytes.Equal(top, again), "the same changes give the same image")
			})
		}
	}
}

// TestWriteDeltaRefusesLongNames: a name that no header holds is an error, before anything is
// written.
func TestWriteDeltaRefusesLongNames(t *testing.T) {
	_, err := qcow2.Write(t.Context(), new(memoryFile), &memoryDisk{size: 512},
		qcow2.WriteOptions{Backing: qcow2.Backing{Name: fmt.Sprintf("%01024d", 1), Format: "raw"}})
	require.ErrorContains(t, err, "too long")
}

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
				opt := qcow2.WriteOptions{Compression: c}
				stored = testtool.Must(qcow2.Write(b.Context(), nowhere{}, d, opt))(b)
			}
			b.ReportMetric(float64(stored)*100/size, "%stored")
		})
	}
}
