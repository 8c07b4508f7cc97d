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
