package overlay

import (
	"bytes"
	"context"
	"math/rand/v2"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// seenChunks counts the whole chunks that a hydration has read at once.
type seenChunks struct {
	*image.ReadAlong
	whole atomic.Int64
}

func (s *seenChunks) Saw(ctx context.Context, p []byte, off int64) {
	if len(p) == 1<<20 && s.UntilChunk(ctx, off) == int64(len(p)) {
		s.whole.Add(1)
	}
	s.ReadAlong.Saw(ctx, p, off)
}

// TestHydrationReadsForTheHash copies an image whose clusters are one run in its file. Every chunk
// of the file in that run is hashed on the way, and the hash is that of the file.
func TestHydrationReadsForTheHash(t *testing.T) {
	const size = 8 << 20
	dir := t.TempDir()
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(content)
	raw := filetest.Put(t, dir, "plain.raw", content, size)
	copyOf := func(t *testing.T, path string, whole int) {
		img := openGood(t, path)
		file := testtool.Must(rawfile.Open(filetest.Put(t, dir, "disk.img", nil, size),
			rawfile.Options{Private: true}))(t)
		defer file.Close()
		o := over(t, file, img, Options{Unit: img.CopyUnit()})
		h := newHydration(o, CopyOptions{Slots: slots.New(4, slots.Options{})})
		hashes := img.Hashes(nil)
		seen := &seenChunks{ReadAlong: image.NewReadAlong(img, hashes[0])}
		h.follower = seen
		require.NoError(t, h.pass(t.Context())) // run would wait for a guest first
		require.Zero(t, o.blocks.clear.Load())
		seen.End()
		require.EqualValues(t, whole, seen.whole.Load())

		require.True(t, bytes.Equal(content, filetest.Read(t, file, 0, size)))
		want, err := img.Fingerprint(t.Context(), img.Hashes(nil), slots.New(2, slots.Options{}))
		require.NoError(t, err)
		along, err := img.Fingerprint(t.Context(), hashes, slots.New(2, slots.Options{}))
		require.NoError(t, err)
		require.Equal(t, want, along)
	}
	t.Run("raw", func(t *testing.T) { copyOf(t, raw, 8) })
	t.Run("qcow2", func(t *testing.T) {
		filetest.QemuImg(t, dir, "convert", "-O", "qcow2", "plain.raw", "plain.qcow2")
		// the first chunk of the file begins with tables
		copyOf(t, filepath.Join(dir, "plain.qcow2"), 7)
	})
}
