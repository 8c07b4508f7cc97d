package image

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/slots"
)

// hashFile is a file whose chunks hold data or zeros, or are holes. It ends inside a chunk.
func hashFile(t *testing.T, chunks int) (*os.File, int64) {
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	size := int64(chunks)*fingerprintChunk + 5*disk.SectorSize
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
	_, err = f.WriteAt(p[:3*disk.SectorSize], size-4*disk.SectorSize)
	require.NoError(t, err)
	return f, size
}

func hashOf(f *os.File, size int64) *Hash {
	return newHash(&fileSource{file: f, stat: unix.Stat_t{Size: size}})
}

func TestContentHashTakesOffers(t *testing.T) {
	const chunks = 40
	f, size := hashFile(t, chunks)
	want, err := hashOf(f, size).run(t.Context(), 3, slots.New(3, slots.Options{}))
	require.NoError(t, err)

	t.Run("of everything, beside its own reading", func(t *testing.T) {
		for seed := range uint64(20) {
			c := hashOf(f, size)
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
		c := hashOf(f, size)
		p := make([]byte, fingerprintChunk)
		for i := range 10 {
			offerChunk(t, c, p, i)
			clear(p)
			c.offer(p, int64(i)*fingerprintChunk) // was taken already
		}
		c.offer(p[:disk.SectorSize], 20*fingerprintChunk)  // no whole chunk
		c.offer(p, 20*fingerprintChunk+disk.SectorSize)    // nor this
		c.offer(p, size/fingerprintChunk*fingerprintChunk) // ends beyond the file
		setOffers(c, time.Now(), time.Now().Add(time.Hour))
		time.AfterFunc(10*time.Millisecond, c.endOffers)
		got, err := c.run(t.Context(), 1, slots.New(1, slots.Options{}))
		require.NoError(t, err)
		require.Equal(t, want, got)
	})

	t.Run("and does not wait for those that are slow", func(t *testing.T) {
		c := hashOf(f, size)
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
		c := hashOf(f, size)
		p := make([]byte, fingerprintChunk)
		offerChunk(t, c, p, 0)
		setOffers(c, time.Now(), time.Now().Add(-2*offersLast))
		c.offer(p, 0) // again, as by a copying that waits for space
		require.LessOrEqual(t, c.offersFor(), time.Duration(0))
	})

	t.Run("and waits for a copying that is behind its reading", func(t *testing.T) {
		c := hashOf(f, size)
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
		c := hashOf(f, size)
		whole := make([]byte, size)
		_, err := f.ReadAt(whole, 0)
		require.NoError(t, err)
		const short = 10*fingerprintChunk + 5
		require.NoError(t, f.Truncate(short))
		_, err = c.run(t.Context(), 1, slots.New(1, slots.Options{}))
		var medium *disk.MediumError
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
func offerChunk(t *testing.T, c *Hash, p []byte, chunk int) {
	t.Helper()
	off := int64(chunk) * fingerprintChunk
	_, err := c.bytes.ReadAt(t.Context(), p, off)
	require.NoError(t, err)
	c.offer(p, off)
}

// setOffers sets the times of the first and the last offer.
func setOffers(c *Hash, first, last time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.first, c.last = first, last
}

// Reading the whole image, which nobody waits for, does not delay a guest that waits for the same
// storage.
func TestHashingLeavesStorageToTheGuest(t *testing.T) {
	f, size := hashFile(t, 8)
	want, err := hashOf(f, size).run(t.Context(), 1, slots.New(1, slots.Options{}))
	require.NoError(t, err)
	c := hashOf(f, size)
	require.Zero(t, c.rest(time.Second), "no guest")
	var paced atomic.Int64
	c.pace = func(took time.Duration) time.Duration {
		paced.Add(1)
		return 3 * took
	}
	require.Equal(t, 3*time.Second, c.rest(time.Second))
	require.Zero(t, c.rest(fromStorage/2), "what is in memory")
	require.EqualValues(t, 1, paced.Load())

	got, err := c.run(t.Context(), 2, slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.Equal(t, want, got)
}
