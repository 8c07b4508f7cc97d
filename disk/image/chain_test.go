package image

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/qcow2"
)

// chainOf makes a chain of levels as container images have them: the lowest has nearly everything,
// and each other one changes some blocks of 4 KiB.
func chainOf(t testing.TB, levels int) string {
	t.Helper()
	const size = 256 << 20
	dir, r := t.TempDir(), rand.New(rand.NewPCG(uint64(levels), 1))
	block := make([]byte, 4<<10)
	name := ""
	for i := range levels {
		below := name
		name = fmt.Sprintf("%d.qcow2", i)
		f, err := os.Create(filepath.Join(dir, name))
		require.NoError(t, err)
		a, err := qcow2.NewAppender(f, qcow2.AppendOptions{Backing: below})
		require.NoError(t, err)
		blocks := r.Perm(size >> 12)[:60] // as many places as an update of some packages changes
		if i == 0 {
			blocks = make([]int, size>>12)
			for j := range blocks {
				blocks[j] = j
			}
		}
		for _, b := range blocks {
			for j := range block {
				block[j] = byte(b + i + j)
			}
			_, err := a.WriteAt(block, int64(b)<<12)
			require.NoError(t, err)
		}
		_, err = a.Finish(size)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	return filepath.Join(dir, name)
}

// TestChainIsReadAsOne compares reads by the index of a chain with reads of its files.
func TestChainIsReadAsOne(t *testing.T) {
	img := openImage(t, chainOf(t, 20))
	require.NotNil(t, img.flat)
	want, got := make([]byte, img.Size()), make([]byte, img.Size())
	_, err := img.ReadAt(t.Context(), got, 0)
	require.NoError(t, err)
	_, err = img.top.ReadAt(t.Context(), want, 0)
	require.NoError(t, err)
	require.True(t, string(want) == string(got))
	for off := int64(0); off < img.Size(); {
		e, err := img.Extent(t.Context(), off, img.Size()-off)
		require.NoError(t, err)
		require.True(t, e.Data)
		off += e.Length
	}
}

// TestChainOfOtherSizes has files that are longer or shorter than those above them: content that a
// shorter file hides does not appear again in a longer one above it.
func TestChainOfOtherSizes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		dir, name := t.TempDir(), ""
		for i := range 7 {
			f, err := os.Create(filepath.Join(dir, fmt.Sprint(i)))
			require.NoError(t, err)
			a, err := qcow2.NewAppender(f, qcow2.AppendOptions{Backing: name})
			require.NoError(t, err)
			clusters := 1 + r.IntN(40)
			for _, c := range r.Perm(clusters)[:r.IntN(clusters)] {
				_, err := a.WriteAt(bytes.Repeat([]byte{byte(i * r.IntN(3))}, 4<<10), int64(c)<<12)
				require.NoError(t, err)
			}
			_, err = a.Finish(int64(clusters) << 12)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			name = fmt.Sprint(i)
		}
		img := openImage(t, filepath.Join(dir, name))
		require.NotNil(t, img.flat)
		want, got := make([]byte, img.Size()), make([]byte, img.Size())
		_, err := img.ReadAt(t.Context(), got, 0)
		require.NoError(t, err)
		_, err = img.top.ReadAt(t.Context(), want, 0)
		require.NoError(t, err)
		require.Equal(t, want, got)
		for off := int64(0); off < img.Size(); off += 4 << 10 {
			_, kind, err := img.top.extent(t.Context(), off, 4<<10)
			require.NoError(t, err)
			require.Equal(t, kind, img.flat.at(off).kind, off)
		}
	}
}

// BenchmarkChain reads chains of files at random. Each file changes blocks anywhere, which is worse
// than layers: see adapter's benchmark of this name.
func BenchmarkChain(b *testing.B) {
	for _, levels := range []int{1, 8, 32, 128} {
		path := chainOf(b, levels)
		b.Run(fmt.Sprint(levels, "/open"), func(b *testing.B) {
			for b.Loop() {
				img, err := Open(path, Options{})
				require.NoError(b, err)
				require.NoError(b, img.Close())
			}
		})
		img := openImage(b, path)
		for _, length := range []int{4 << 10, 256 << 10} {
			b.Run(fmt.Sprint(levels, "/", length>>10, "K"), func(b *testing.B) {
				b.SetBytes(int64(length))
				p, r := make([]byte, length), rand.New(rand.NewPCG(1, 1))
				for b.Loop() {
					off := r.Int64N(img.Size()/int64(length)) * int64(length)
					if _, err := img.ReadAt(b.Context(), p, off); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkChainByHand reads a chain in which each file changes blocks at random places. In turns,
// it reads the same bytes with nothing but one pread for each place, and with as many preads from
// one file that has everything. It compares processor time, which other work on the machine changes
// little, and tells which part of it is system calls.
func BenchmarkChainByHand(b *testing.B) {
	for _, levels := range []int{1, 32, 128} {
		img := openImage(b, chainOf(b, levels))
		one := filepath.Join(b.TempDir(), "one")
		content := make([]byte, img.Size())
		_, err := img.ReadAt(b.Context(), content, 0)
		require.NoError(b, err)
		require.NoError(b, os.WriteFile(one, content, 0o644))
		single, err := os.Open(one)
		require.NoError(b, err)
		defer single.Close()
		if img.flat == nil { // of one file there is none
			img.flat, err = img.top.flatten(b.Context())
			require.NoError(b, err)
		}
		for _, length := range []int64{4 << 10, 256 << 10} {
			p := make([]byte, length)
			var places int
			ways := []func(off int64) (int, error){
				func(off int64) (int, error) { return single.ReadAt(p, off) },
				func(off int64) (int, error) { return img.ReadAt(b.Context(), p, off) },
				func(off int64) (int, error) {
					done := 0
					for i := img.flat.index(off); done < len(p); i++ {
						run := img.flat.runs[i]
						at := off + int64(done)
						part := p[done:][:min(int64(len(p)-done), run.end()-at)]
						n, err := unix.Pread(int(run.file.local.Fd()), part, run.host+at-run.start)
						if err != nil {
							return done, err
						}
						done, places = done+n, places+1
					}
					return done, nil
				},
			}
			b.Run(fmt.Sprint(levels, "/", length>>10, "K"), func(b *testing.B) {
				r := rand.New(rand.NewPCG(1, 1))
				took := make([]int64, len(ways))
				runtime.LockOSThread() // it is the thread's time
				defer runtime.UnlockOSThread()
				var offs [100]int64
				places = 0
				for b.Loop() {
					for i := range offs {
						offs[i] = r.Int64N(img.Size()/length) * length
					}
					for i, read := range ways {
						start := threadTime(b)
						for _, off := range offs {
							if n, err := read(off); err != nil || n != len(p) {
								b.Fatal(n, err)
							}
						}
						took[i] += threadTime(b) - start
					}
				}
				reads := float64(b.N * len(offs))
				b.ReportMetric(float64(places)/reads, "places/read")
				b.ReportMetric(float64(took[1])/float64(took[0]), "chain/one")
				b.ReportMetric(float64(took[2])/float64(took[0]), "hand/one")
				b.ReportMetric(float64(took[1])/float64(took[2]), "chain/hand")
			})
		}
	}
}

// threadTime is the processor time that this thread has used, nanoseconds.
func threadTime(b *testing.B) int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		b.Fatal(err)
	}
	return now.Nano()
}
