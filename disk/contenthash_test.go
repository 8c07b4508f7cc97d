package disk

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk/internal/slots"
)

// hashFile is a file of chunks that hold data, zeros, or are holes, with an end inside a chunk.
func hashFile(t *testing.T, chunks int) (*os.File, int64) {
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	size := int64(chunks)*fingerprintChunk + 5*SectorSize
	require.NoError(t, f.Truncate(size))
	random := rand.NewChaCha8([32]byte{1})
	p := make([]byte, fingerprintChunk)
	for i := range chunks {
		switch i % 4 {
		case 1:
			clear(p)
		case 3:
			continue
		default:
			_, _ = random.Read(p)
		}
		_, err := f.WriteAt(p, int64(i)*fingerprintChunk)
		require.NoError(t, err)
	}
	_, err = f.WriteAt(p[:3*SectorSize], size-4*SectorSize)
	require.NoError(t, err)
	return f, size
}

func TestContentHashTakesOffers(t *testing.T) {
	const chunks = 40
	f, size := hashFile(t, chunks)
	want, err := newContentHash(f, size).run(t.Context(), 3, slots.New(3, slots.Options{}))
	require.NoError(t, err)

	t.Run("of everything, beside its own reading", func(t *testing.T) {
		for seed := range uint64(20) {
			c := newContentHash(f, size)
			var offering sync.WaitGroup
			for worker := range 3 {
				offering.Go(func() {
					p := make([]byte, fingerprintChunk)
					for _, i := range rand.New(rand.NewPCG(seed, uint64(worker))).Perm(chunks) {
						off := int64(i) * fingerprintChunk
						if _, err := f.ReadAt(p, off); err != nil {
							panic(err)
						}
						c.offer(p, off)
						setOffers(c, time.Time{}, time.Time{}) // it reads on at once
					}
				})
			}
			got, err := c.run(t.Context(), 2, slots.New(2, slots.Options{}))
			offering.Wait()
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	})

	t.Run("and reads what was not offered when they end", func(t *testing.T) {
		c := newContentHash(f, size)
		p := make([]byte, fingerprintChunk)
		for i := range 10 {
			offerChunk(t, c, p, i)
			clear(p)
			c.offer(p, int64(i)*fingerprintChunk) // was taken already
		}
		c.offer(p[:SectorSize], 20*fingerprintChunk)       // no whole chunk
		c.offer(p, 20*fingerprintChunk+SectorSize)         // nor this
		c.offer(p, size/fingerprintChunk*fingerprintChunk) // ends beyond the file
		setOffers(c, time.Now(), time.Now().Add(time.Hour))
		time.AfterFunc(10*time.Millisecond, c.endOffers)
		got, err := c.run(t.Context(), 1, slots.New(1, slots.Options{}))
		require.NoError(t, err)
		require.Equal(t, want, got)
	})

	t.Run("and does not wait for those that are slow", func(t *testing.T) {
		c := newContentHash(f, size)
		p := make([]byte, fingerprintChunk)
		for i := range 10 {
			offerChunk(t, c, p, i)
		}
		require.Positive(t, c.offersFor())
		setOffers(c, time.Now().Add(-2*offersLast), time.Now().Add(time.Hour))
		got, err := c.run(t.Context(), 1, slots.New(1, slots.Options{}))
		require.NoError(t, err)
		require.Equal(t, want, got)
	})

	t.Run("and does not wait for what it has", func(t *testing.T) {
		c := newContentHash(f, size)
		p := make([]byte, fingerprintChunk)
		offerChunk(t, c, p, 0)
		setOffers(c, time.Now(), time.Now().Add(-2*offersLast))
		c.offer(p, 0) // again, as by a copying that waits for space
		require.LessOrEqual(t, c.offersFor(), time.Duration(0))
	})

	t.Run("and waits for a copying that is behind its reading", func(t *testing.T) {
		c := newContentHash(f, size)
		p := make([]byte, fingerprintChunk)
		for range 2 {
			more, _, err := c.readNext(t.Context(), p)
			require.NoError(t, err)
			require.True(t, more)
		}
		require.LessOrEqual(t, c.offersFor(), time.Duration(0))
		before := c.sum.Load()
		c.offer(p, fingerprintChunk)
		require.Positive(t, c.offersFor())
		require.Equal(t, before, c.sum.Load(), "hashed twice")
		setOffers(c, time.Now(), time.Now().Add(-2*offersLast))
		c.offer(p, fingerprintChunk) // again
		require.LessOrEqual(t, c.offersFor(), time.Duration(0))
	})

	t.Run("and goes on after an error", func(t *testing.T) {
		c := newContentHash(f, size)
		whole := make([]byte, size)
		_, err := f.ReadAt(whole, 0)
		require.NoError(t, err)
		const short = 10*fingerprintChunk + 5
		require.NoError(t, f.Truncate(short))
		_, err = c.run(t.Context(), 1, slots.New(1, slots.Options{}))
		var medium *MediumError
		require.ErrorAs(t, err, &medium)
		require.EqualValues(t, 10*fingerprintChunk, medium.Off)
		clear(whole[:10*fingerprintChunk]) // is not read again
		_, err = f.WriteAt(whole, 0)
		require.NoError(t, err)
		got, err := c.run(t.Context(), 2, slots.New(2, slots.Options{}))
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

// offerChunk reads a chunk of the file into p and offers it.
func offerChunk(t *testing.T, c *contentHash, p []byte, chunk int) {
	t.Helper()
	off := int64(chunk) * fingerprintChunk
	_, err := c.file.ReadAt(p, off)
	require.NoError(t, err)
	c.offer(p, off)
}

// setOffers makes it that the first and the last offer came at these times.
func setOffers(c *contentHash, first, last time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.first, c.last = first, last
}

// TestHydrationReadsForTheHash has an image be copied whose clusters lie in its file in one run: every chunk of the file in that run is
// hashed on the way, and the hash is that of the file.
func TestHydrationReadsForTheHash(t *testing.T) {
	const size = 8 << 20
	dir := t.TempDir()
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(content)
	raw := put(t, dir, "plain.raw", content, size)
	copyOf := func(t *testing.T, path string, whole int) {
		img := openImage(t, path)
		file, err := OpenFile(put(t, dir, "disk.img", nil, size), FileOptions{Private: true})
		require.NoError(t, err)
		defer file.Close()
		blocks := newBlockMap(blocksOf(size))
		maps := newMapStore(len(blocks.pages))
		held, err := markHoles(img, blocks, maps.save)
		require.NoError(t, err)
		over := newOverlay(file, img, blocks, maps, held, overlayOptions{})
		h := newHydration(over, zap.NewNop(), img.copyUnit(), slots.New(4, slots.Options{}))
		hash := &readAlong{img: img, content: newContentHash(img.top.file, img.top.stat.Size)}
		h.follower = hash
		require.NoError(t, h.pass(t.Context())) // run would wait for a guest first
		require.Zero(t, blocks.clear.Load())
		hash.end()
		taken := 0
		hash.content.offered.each(func(_, length int64) { taken += int(length / fingerprintChunk) })
		require.Equal(t, whole, taken)

		got := make([]byte, size)
		_, err = file.ReadAt(got, 0)
		require.NoError(t, err)
		require.True(t, bytes.Equal(content, got))
		want, err := img.fingerprint(t.Context(), img.contents(nil), slots.New(2, slots.Options{}))
		require.NoError(t, err)
		along, err := img.fingerprint(t.Context(), []*contentHash{hash.content}, slots.New(2, slots.Options{}))
		require.NoError(t, err)
		require.Equal(t, want, along)
	}
	t.Run("raw", func(t *testing.T) { copyOf(t, raw, 8) })
	t.Run("qcow2", func(t *testing.T) {
		qemuImg(t, dir, "convert", "-O", "qcow2", "plain.raw", "plain.qcow2")
		copyOf(t, filepath.Join(dir, "plain.qcow2"), 7) // the first chunk of the file begins with tables
	})
}

// A guest that waits for the same storage is not held up by the reading of the whole image, which nobody waits for.
func TestHashingLeavesStorageToTheGuest(t *testing.T) {
	f, size := hashFile(t, 8)
	want, err := newContentHash(f, size).run(t.Context(), 1, slots.New(1, slots.Options{}))
	require.NoError(t, err)
	c := newContentHash(f, size)
	require.Zero(t, c.rest(time.Second), "no guest")
	guest := new(guestWatch)
	c.pace = guest.rest
	guest.touch()
	require.Equal(t, 3*time.Second, c.rest(time.Second))
	require.Zero(t, c.rest(fromStorage/2), "what is in memory")
	guest.activeAt.Store(0)
	require.Zero(t, c.rest(time.Second), "the guest has been idle for a while")

	guest.activeAt.Store(time.Now().Add(time.Hour).UnixNano())
	got, err := c.run(t.Context(), 2, slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.Equal(t, want, got)
}
