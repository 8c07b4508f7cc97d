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
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// hashFile is a file whose chunks hold data or zeros, or are holes. It ends inside a chunk.
func hashFile(t *testing.T, chunks int) (*os.File, int64) {
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "image")))(t)
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
		require.NoError(t, testtool.Err(f.WriteAt(p, int64(i)*fingerprintChunk)))
	}
	require.NoError(t, testtool.Err(f.WriteAt(p[:3*disk.SectorSize], size-4*disk.SectorSize)))
	return f, size
}

func hashOf(f *os.File, size int64) *Hash {
	return newHash(&fileSource{file: f, stat: unix.Stat_t{Size: size}})
}

func TestContentHashTakesOffers(t *testing.T) {
	const chunks = 40
	f, size := hashFile(t, chunks)
	want := testtool.Must(hashOf(f, size).run(t.Context(), 3, slots.New(3, slots.Options{})))(t)

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
		got := testtool.Must(c.run(t.Context(), 1, slots.New(1, slots.Options{})))(t)
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
		got := testtool.Must(c.run(t.Context(), 1, slots.New(1, slots.Options{})))(t)
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
			more, _ := testtool.Must2(c.readNext(t.Context(), p))(t)
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
		require.NoError(t, testtool.Err(f.ReadAt(whole, 0)))
		const short = 10*fingerprintChunk + 5
		require.NoError(t, f.Truncate(short))
		_, err := c.run(t.Context(), 1, slots.New(1, slots.Options{}))
		var medium *disk.MediumError
		require.ErrorAs(t, err, &medium)
		require.EqualValues(t, 10*fingerprintChunk, medium.Off)
		clear(whole[:10*fingerprintChunk]) // is not read again
		require.NoError(t, testtool.Err(f.WriteAt(whole, 0)))
		got := testtool.Must(c.run(t.Context(), 2, slots.New(2, slots.Options{})))(t)
		require.Equal(t, want, got)
	})
}

// offerChunk reads a chunk of the file into p and offers it.
func offerChunk(t *testing.T, c *Hash, p []byte, chunk int) {
	t.Helper()
	off := int64(chunk) * fingerprintChunk
	require.NoError(t, testtool.Err(c.bytes.ReadAt(t.Context(), p, off)))
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
	want := testtool.Must(hashOf(f, size).run(t.Context(), 1, slots.New(1, slots.Options{})))(t)
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

	require.Equal(t, want, testtool.Must(c.run(t.Context(), 2, slots.New(2, slots.Options{})))(t))
}

// Two images of one size in read-only file systems, both built reproducibly, differ only in their
// content.
func TestTimesOfArchivesAreNotRelied(t *testing.T) {
	changed := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC).UnixNano()
	print := Fingerprint{
		Name: "disk.raw", Format: FormatRaw, Size: 1 << 20, Hash: "0123456789abcdef",
		Identity: Identity{Dev: 1, Ino: 2, MTime: 3, CTime: changed},
	}
	now := print
	now.Hash = ""
	require.True(t, now.untouched(&print), "the kernel tells of every change")
	now.CTime++
	require.False(t, now.untouched(&print), "the other time can be set back")
	now.CTime--
	print.CTime, now.CTime = changed/1e9*1e9, changed/1e9*1e9
	require.False(t, now.untouched(&print), "the content decides")
	print.Hash = ""
	require.True(t, now.untouched(&print), "there is nothing better to go by")

	dir := t.TempDir()
	img := openImage(t, filetest.Put(t, dir, "disk.raw", filetest.Block(1, 1<<20), 0))
	old, err := img.Fingerprint(t.Context(), img.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	img.top.bytes.(*fileSource).stat.Ctim.Nsec, old[0].CTime = 0, old[0].CTime/1e9*1e9
	reason, same := testtool.Must2(img.Compare(t.Context(), old))(t)
	require.Empty(t, reason)
	require.Equal(t, old, same, "it is read, and is the same")
	old[0].Hash = "0123456789abcdef"
	reason, _ = testtool.Must2(img.Compare(t.Context(), old))(t)
	require.Contains(t, reason, "\"disk.raw\" differs, with the same size")
}

func TestFingerprintDoesNotDependOnHoles(t *testing.T) {
	dir := t.TempDir()
	content := append(filetest.Block(1, 4096), make([]byte, 5<<20)...)
	full := openImage(t, filetest.Put(t, dir, "full.raw", content, 0))
	sparse := openImage(t, filetest.Put(t, dir, "sparse.raw", content[:4096], int64(len(content))))
	a, err := full.Fingerprint(t.Context(), full.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	b, err := sparse.Fingerprint(t.Context(), sparse.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.Equal(t, a[0].Hash, b[0].Hash)

	// The same chunks in another place are another image.
	shifted := append(make([]byte, 2<<20), content[:len(content)-2<<20]...)
	other := openImage(t, filetest.Put(t, dir, "shifted.raw", shifted, 0))
	c, err := other.Fingerprint(t.Context(), other.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.NotEqual(t, a[0].Hash, c[0].Hash)
}
