package adapter

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// layersAsOf makes the layers of an image as package managers and COPY make them: 6,000 files in
// 600 directories, then layers that each add and replace some files all over the tree.
func layersAsOf(t testing.TB, layers int) (archives [][]byte) {
	r := rand.New(rand.NewPCG(uint64(layers), 1))
	name := func(i int) string { return fmt.Sprintf("usr/%d/%d/file-%d", i/200, i/10, i) }
	content := func() string {
		return strings.Repeat(fmt.Sprintf("%015x\n", r.Uint64()), 1+r.IntN(40<<10/16))
	}
	var base []item
	for i := range 6000 {
		base = append(base, file(name(i), content()))
	}
	archives = append(archives, layerOf(t, base...))
	for k := 1; k < layers; k++ {
		var some []item
		for i := range 20 {
			n := r.IntN(6000)
			some = append(some, file(name(n), content()),
				file(fmt.Sprintf("%s-%d-%d", name(r.IntN(6000)), k, i), content()))
		}
		archives = append(archives, layerOf(t, some...))
	}
	return archives
}

// asOne writes a disk into one file, in the order of the disk.
func asOne(t testing.TB, img *image.Image) string {
	path := filepath.Join(t.TempDir(), "one.qcow2")
	f := testtool.Must(os.Create(path))(t)
	defer f.Close()
	a := testtool.Must(qcow2.NewAppender(f, qcow2.AppendOptions{}))(t)
	p := make([]byte, 1<<20)
	for off := int64(0); off < img.Size(); {
		e := testtool.Must(img.Extent(t.Context(), off, img.Size()-off))(t)
		for end := off + e.Length; off < end; {
			part := p[:min(int64(len(p)), end-off)]
			if e.Data {
				_, err := img.ReadAt(t.Context(), part, off)
				require.True(t, err == nil || err == io.EOF)
				require.NoError(t, testtool.Err(a.WriteAt(part, off)))
			}
			off += int64(len(part))
		}
	}
	require.NoError(t, testtool.Err(a.Finish(img.Size())))
	return path
}

// BenchmarkChain reads the stored data of a disk with this many levels at random, and of the same
// disk in one file.
func BenchmarkChain(b *testing.B) {
	for _, levels := range []int{8, 32, 128} {
		dir := b.TempDir()
		d := build(b, dir, imageOf(layersAsOf(b, levels-1)...))
		chain := testtool.Must(image.Open(d.Path, image.Options{}))(b)
		defer chain.Close()
		one := testtool.Must(image.Open(asOne(b, chain), image.Options{}))(b)
		defer one.Close()
		b.Run(fmt.Sprint(levels, "/open"), func(b *testing.B) {
			for b.Loop() {
				require.NoError(b, testtool.Must(image.Open(d.Path, image.Options{}))(b).Close())
			}
		})
		for _, length := range []int64{4 << 10, 256 << 10} {
			var stored []int64
			for off := int64(0); off < chain.Size(); off += length {
				e := testtool.Must(chain.Extent(b.Context(), off, length))(b)
				if e.Data {
					stored = append(stored, off)
				}
			}
			b.Run(fmt.Sprint(levels, "/", length>>10, "K"), func(b *testing.B) {
				p, r := make([]byte, length), rand.New(rand.NewPCG(1, 1))
				var took [2]time.Duration
				for b.Loop() { // in turns, because the speed of the machine varies
					for i, img := range []*image.Image{one, chain} {
						start := time.Now()
						for range 100 {
							_, err := img.ReadAt(b.Context(), p, stored[r.IntN(len(stored))])
							require.NoError(b, err)
						}
						took[i] += time.Since(start)
					}
				}
				b.ReportMetric(float64(took[1])/float64(took[0]), "chain/one")
				b.ReportMetric(float64(took[1].Nanoseconds())/float64(100*b.N), "ns/read")
			})
		}
	}
}
