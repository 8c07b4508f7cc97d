package rawfile

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// bypassed returns a new private file of that size and its cacheBypass. It skips the test if the
// file system has none.
func bypassed(t *testing.T, size int64) (*File, *cacheBypass) {
	t.Helper()
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "disk.img")))(t)
	require.NoError(t, f.Truncate(size))
	require.NoError(t, f.Close())
	d := testtool.Must(Open(f.Name(), Options{Private: true, Durable: true}))(t)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	past := d.OpenPastCache()
	if past == nil {
		t.Skip("skipped: the temporary directory is neither on ext4 nor on XFS")
	}
	t.Cleanup(func() { require.NoError(t, past.Close()) })
	return d, past
}

// TestPastCacheBesideGuest has a guest write through the cache and a worker copy past it into
// blocks between. No flush fails, and every block has what was written to it last.
func TestPastCacheBesideGuest(t *testing.T) {
	const size, block, run = 64 << 20, 4 << 10, 64 << 10
	d, past := bypassed(t, size)
	var group sync.WaitGroup
	done := make(chan struct{})
	group.Go(func() { // a flush reports every conflict since the last one
		for {
			if err := d.Flush(); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	want := make([]byte, size)
	var through, around atomic.Int64
	var guest, copies sync.WaitGroup
	// The guest writes the first block of each run, before or after the copying. The others are
	// copied.
	var copied atomic.Int64
	var nearby [run]byte
	guest.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		for i := range size / run {
			for copied.Load() < int64(i)-16 {
				runtime.Gosched()
			}
			off := int64((i + 16 - r.IntN(32) + size/run) % (size / run) * run)
			if _, err := d.ReadAt(t.Context(), nearby[:], off); err != nil { // makes a large folio
				t.Error(err)
			}
			p := want[off : off+block]
			for j := range p {
				p[j] = byte(r.Uint32()) | 1
			}
			if _, err := d.WriteAt(t.Context(), p, off); err != nil {
				t.Error(err)
			}
			if i%7 == 0 {
				clear(p)
				if err := d.Discard(t.Context(), off, block); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for worker := range 3 {
		copies.Go(func() {
			r := rand.New(rand.NewPCG(3, uint64(worker)))
			buf := make([]byte, 1<<20) // on the heap, and so aligned
			for i := worker; i < size/run; i += 3 {
				off := int64(i*run + block)
				p := buf[:run-block]
				for j := range p {
					p[j] = byte(r.Uint32()) | 1
				}
				copy(want[off:], p)
				_, err := past.WriteAt(p, off)
				if errors.Is(err, errThroughCache) {
					through.Add(1)
					_, err = d.WriteAt(t.Context(), p, off)
				} else {
					around.Add(1)
				}
				copied.Add(1)
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	guest.Wait()
	copies.Wait()
	close(done)
	group.Wait()
	t.Logf("%d runs went past the cache, %d through it", around.Load(), through.Load())
	require.NoError(t, d.Flush())
	require.True(t, bytes.Equal(want, filetest.Read(t, d, 0, size)))
}

// TestCacheGuard checks that a writer through the cache waits for a write past it in the same
// region, and that no other one begins meanwhile.
func TestCacheGuard(t *testing.T) {
	g := newCacheGuard(8<<20, &holeMap{written: NewRegions(8<<20, holeRegion)})
	require.True(t, g.begin(2<<20, 4096))
	require.True(t, g.begin(3<<20, 4096), "two writes past the cache may be under way")
	g.through(0, 2<<20) // another region
	g.through(4<<20, 4096)
	came := make(chan struct{})
	go func() {
		g.through(4<<20-512, 1024)
		close(came)
	}()
	g.end(2<<20, 4096)
	testtool.Waits(t, came)
	g.end(3<<20, 4096)
	<-came
	for _, off := range []int64{0, 2<<20 - 512, 2 << 20, 4<<20 - 4096, 6<<20 - 4096} {
		require.False(t, g.begin(off, 4096), off)
	}
	require.True(t, g.begin(6<<20, 4096))
	require.False(t, (*cacheGuard)(nil).begin(0, 4096))
	(*cacheGuard)(nil).through(0, 4096)
}

// TestCacheGuardLetsNothingPassWhoWaits checks that a guest waits for writes past the cache that
// are under way, and for none that comes later: storage may be slow.
func TestCacheGuardLetsNothingPassWhoWaits(t *testing.T) {
	g := newCacheGuard(8<<20, &holeMap{written: NewRegions(8<<20, holeRegion)})
	require.True(t, g.begin(0, 4096))
	came := make(chan struct{})
	go func() {
		g.through(1<<20, 4096)
		close(came)
	}()
	testtool.Eventually(t, func() bool {
		passes := g.begin(8192, 4096)
		if passes {
			g.end(8192, 4096)
		}
		return !passes // the guest waits
	}, "writes past the cache overtake the guest for ever")
	select {
	case <-came:
		t.Fatal("it did not wait for the write that was under way")
	default:
	}
	g.end(0, 4096)
	<-came
}

// TestCacheGuardKnowsOldContent checks that content from before the opening counts as dirty.
func TestCacheGuardKnowsOldContent(t *testing.T) {
	holes := &holeMap{written: NewRegions(8<<20, holeRegion)}
	holes.note(3<<20, 1)
	g := newCacheGuard(8<<20-512, holes)
	require.True(t, g.begin(2<<20-4096, 4096))
	require.False(t, g.begin(2<<20, 4096), "a folio may lie there")
	require.True(t, g.begin(4<<20, 4096))
	require.True(t, g.begin(7<<20, 4096))
	require.False(t, newCacheGuard(4096, nil).begin(0, 4096), "nothing is known of the file")
}

// TestCacheGuardOfAnyContent checks that the guard knows exactly the regions that hold data.
func TestCacheGuardOfAnyContent(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 200 {
		size := (1 + r.Int64N(400<<20/disk.SectorSize)) * disk.SectorSize
		holes := &holeMap{written: NewRegions(size, holeRegion)}
		for range r.IntN(20) {
			off := r.Int64N(size)
			holes.note(off, 1+r.Int64N(min(size-off, 1<<(20+r.IntN(10)))))
		}
		g := newCacheGuard(size, holes)
		for off := int64(0); off < size; off += cacheRegion {
			n := min(cacheRegion, size-off)
			require.Equal(t, holes.empty(off, n), g.begin(off, n), "%d of %d", off, size)
		}
	}
}

func TestPastCacheErrors(t *testing.T) {
	d, past := bypassed(t, 8<<20)
	p := make([]byte, 8192)
	_, err := past.WriteAt(p[1:4097], 4096)
	require.ErrorIs(t, err, unix.EINVAL, "the memory is not aligned")
	require.ErrorContains(t, testtool.Err(past.WriteAt(p, 8<<20-4096)), "outside of a disk")
	require.Zero(t, testtool.Must(past.WriteAt(nil, 0))(t))
	d.failed.Store(true)
	require.ErrorIs(t, testtool.Err(past.WriteAt(p, 0)), disk.ErrFailed)
}
