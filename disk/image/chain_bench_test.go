package image

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

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
	_, err := img.ReadAt(got, 0)
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

// TestChainOfOtherSizes has files that are longer or shorter than those above them: what a shorter
// one hides does not appear again where one above it is longer.
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
		_, err := img.ReadAt(got, 0)
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

// BenchmarkChain reads chains of files at random. Each file changes blocks that are anywhere, which
// is worse than what layers do: see adapter's benchmark of this name.
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
					if _, err := img.ReadAt(p, off); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
