package disktest

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
)

// minSize is the size in bytes of the smallest disk that Run accepts.
const minSize = 1 << 20

// maxModel is how many bytes of a disk are compared with the model at most.
const maxModel = 8 << 20

// Run checks that a disk keeps every promise of disk.Disk and of its optional interfaces. It calls
// open once per part of the suite. open returns a writable disk of at least 1 MiB, with any
// content, and closes it by t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) disk.Disk) {
	t.Helper()
	parts := []struct {
		name string
		run  func(*testing.T, disk.Disk)
	}{
		{"size", testSize},
		{"boundaries", testBoundaries},
		{"random operations", testRandom},
		{"zeroing", testZeroing},
		{"extents", testExtents},
		{"concurrency", testConcurrency},
		{"outside of the disk", testOutside},
		{"no allocation", testNoAllocation},
		{"distance", testDistance},
	}
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) {
			d := open(t)
			require.GreaterOrEqual(t, d.Size(), int64(minSize), "the suite needs a larger disk")
			part.run(t, d)
		})
	}
}

// read reads a range. The test fails if that does not work.
func read(t *testing.T, d disk.Disk, off, length int64) []byte {
	t.Helper()
	p := bytes.Repeat([]byte{0xa5}, int(length)) // so that bytes that are not filled show
	n := testtool.Must(d.ReadAt(t.Context(), p, off))(t)
	require.Equal(t, len(p), n)
	return p
}

// write writes a range. The test fails if that does not work.
func write(t *testing.T, d disk.Disk, p []byte, off int64) {
	t.Helper()
	n := testtool.Must(d.WriteAt(t.Context(), p, off))(t)
	require.Equal(t, len(p), n)
}

// pattern returns n bytes, none of them zero, different for each seed.
func pattern(n int, seed uint64) []byte {
	p := make([]byte, n)
	Fill(p, rand.New(rand.NewPCG(seed, 1)))
	return p
}

// Fill fills p with random bytes, none of them zero. It makes eight at a time, because the race
// detector makes every step slow.
func Fill(p []byte, r *rand.Rand) {
	var eight [8]byte
	for len(p) > 0 {
		binary.LittleEndian.PutUint64(eight[:], r.Uint64()|0x0101010101010101)
		p = p[copy(p, eight[:]):]
	}
}

func testSize(t *testing.T, d disk.Disk) {
	require.Positive(t, d.Size())
	require.Zero(t, d.Size()%disk.SectorSize)
	size := d.Size()
	write(t, d, pattern(disk.SectorSize, 1), size-disk.SectorSize)
	require.Equal(t, size, d.Size())
}

// testBoundaries writes and reads around the edges of blocks and of the disk.
func testBoundaries(t *testing.T, d disk.Disk) {
	size := d.Size()
	for i, edge := range []int64{0, disk.SectorSize, 4 << 10, 64 << 10, 256 << 10,
		size / 2 / 4096 * 4096, size} {
		for _, length := range []int64{disk.SectorSize, 4 << 10, 4<<10 + disk.SectorSize,
			64 << 10} {
			off := min(max(0, edge-length/2/disk.SectorSize*disk.SectorSize), size-length)
			data := pattern(int(length), uint64(i))
			write(t, d, data, off)
			require.Equal(t, data, read(t, d, off, length), "%d bytes at %d", length, off)
		}
	}
	n, err := d.ReadAt(t.Context(), nil, 0)
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = d.WriteAt(t.Context(), nil, size)
	require.NoError(t, err)
	require.Zero(t, n)
}

// testRandom does random operations and compares the disk with a model in memory.
func testRandom(t *testing.T, d disk.Disk) {
	size := min(d.Size(), maxModel)
	model := read(t, d, 0, size)
	discarder, _ := d.(disk.Discarder)
	zeroer, _ := d.(disk.Zeroer)
	r := rand.New(rand.NewPCG(7, 7))
	for i := range 400 {
		off := r.Int64N(size/disk.SectorSize) * disk.SectorSize
		length := min(size-off, (1+r.Int64N(1<<r.IntN(10)))*disk.SectorSize)
		part := model[off : off+length]
		switch op := r.IntN(6); {
		case op == 0 && discarder != nil:
			require.NoError(t, discarder.Discard(t.Context(), off, length))
			clear(part)
		case op == 1 && zeroer != nil:
			require.NoError(t, zeroer.Zero(t.Context(), off, length))
			clear(part)
		case op == 2:
			require.NoError(t, d.Flush())
		case op == 3:
			require.True(t, bytes.Equal(part, read(t, d, off, length)),
				"operation %d: %d bytes at %d differ", i, length, off)
		default:
			copy(part, pattern(int(length), r.Uint64()))
			write(t, d, part, off)
		}
	}
	require.True(t, bytes.Equal(model, read(t, d, 0, size)),
		"the disk differs from the model at the end")
}

// testZeroing discards and zeroes parts of what was written.
func testZeroing(t *testing.T, d disk.Disk) {
	ops := map[string]func(ctx context.Context, off, length int64) error{}
	if x, ok := d.(disk.Discarder); ok {
		ops["discard"] = x.Discard
	}
	if x, ok := d.(disk.Zeroer); ok {
		ops["zero"] = x.Zero
	}
	if len(ops) == 0 {
		t.Skip("the disk neither discards nor zeroes")
	}
	const total = 256 << 10
	for name, op := range ops {
		for _, c := range []struct{ off, length int64 }{
			{0, total}, {0, 512}, {512, 512}, {3584, 1024}, {4096, 4096}, {512, 8192},
			{65536, 65536}, {total - 512, 512}, {4096, 0},
		} {
			data := pattern(total, uint64(c.off))
			write(t, d, data, 0)
			require.NoError(t, op(t.Context(), c.off, c.length), "%s of %d at %d", name, c.length,
				c.off)
			clear(data[c.off : c.off+c.length])
			require.True(t, bytes.Equal(data, read(t, d, 0, total)), "%s of %d bytes at %d", name,
				c.length, c.off)
		}
		// The end of the disk, and then the whole disk.
		end := d.Size() - 1536
		write(t, d, pattern(1536, 2), end)
		require.NoError(t, op(t.Context(), end+512, 1024))
		require.Equal(t, make([]byte, 1024), read(t, d, end+512, 1024))
		require.NoError(t, op(t.Context(), 0, d.Size()))
		require.Equal(t, make([]byte, total), read(t, d, 0, total))
		write(t, d, pattern(4096, 3), 4096)
		require.Equal(t, pattern(4096, 3), read(t, d, 4096, 4096))
	}
}

// testExtents checks that holes read as zeros, and that the runs cover the disk.
func testExtents(t *testing.T, d disk.Disk) {
	x, ok := d.(disk.Extenter)
	if !ok {
		t.Skip("the disk does not tell its extents")
	}
	write(t, d, pattern(64<<10, 1), 0)
	write(t, d, pattern(4<<10, 2), 256<<10)
	write(t, d, pattern(512, 3), d.Size()-512)
	if discarder, ok := d.(disk.Discarder); ok {
		require.NoError(t, discarder.Discard(t.Context(), 8<<10, 16<<10))
	}
	for off := int64(0); off < d.Size(); {
		e := testtool.Must(x.Extent(t.Context(), off, d.Size()-off))(t)
		require.Positive(t, e.Length)
		require.LessOrEqual(t, off+e.Length, d.Size())
		if !e.Data {
			for at := off; at < off+e.Length; at += maxModel {
				p := read(t, d, at, min(maxModel, off+e.Length-at))
				require.True(t, bytes.Count(p, []byte{0}) == len(p),
					"the hole of %d bytes at %d holds data", e.Length, off)
			}
		}
		off += e.Length
	}
	for _, off := range []int64{0, 512, 60 << 10, 256 << 10, d.Size() - 512} {
		e := testtool.Must(x.Extent(t.Context(), off, 512))(t)
		require.Equal(t, disk.Extent{Length: 512, Data: true}, e, "at %d", off)
	}
}

// testConcurrency has goroutines write, read, discard and flush their own parts while others read
// the whole disk.
func testConcurrency(t *testing.T, d disk.Disk) {
	const parts, partSize = 8, 64 << 10
	rounds := testtool.Rounds(10, 60)
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	errs := make(chan error, parts+2)
	for i := range int64(parts) {
		writers.Go(func() {
			p, q := make([]byte, partSize), make([]byte, partSize)
			for round := range uint64(rounds) {
				copy(p, pattern(partSize, round))
				if _, err := d.WriteAt(t.Context(), p, i*partSize); err != nil {
					errs <- err
					return
				}
				if x, ok := d.(disk.Discarder); ok && round%3 == 0 {
					if err := x.Discard(t.Context(), i*partSize+8192, 4096); err != nil {
						errs <- err
						return
					}
					clear(p[8192 : 8192+4096])
				}
				if err := d.Flush(); err != nil {
					errs <- err
					return
				}
				if _, err := d.ReadAt(t.Context(), q, i*partSize); err != nil {
					errs <- err
					return
				}
				if !bytes.Equal(p, q) {
					t.Errorf("part %d reads differently from what was written in round %d", i,
						round)
					return
				}
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			p := make([]byte, parts*partSize)
			for {
				select {
				case <-done:
					return
				default:
				}
				if _, err := d.ReadAt(t.Context(), p, 0); err != nil {
					errs <- err
					return
				}
				if x, ok := d.(disk.Extenter); ok {
					e, err := x.Extent(t.Context(), 0, parts*partSize)
					if err != nil || e.Length <= 0 {
						errs <- err
						return
					}
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
}

// testOutside checks that a range outside of the disk does no harm.
func testOutside(t *testing.T, d disk.Disk) {
	size := d.Size()
	for _, off := range []int64{-512, size - 512, size, size + 512} {
		_, err := d.WriteAt(t.Context(), make([]byte, 1024), off)
		require.Error(t, err, "a write of 1024 bytes at %d", off)
		_, err = d.ReadAt(t.Context(), make([]byte, 1024), off)
		require.Error(t, err, "a read of 1024 bytes at %d", off)
		if x, ok := d.(disk.Discarder); ok {
			require.Error(t, x.Discard(t.Context(), off, 1024), "a discard of 1024 bytes at %d",
				off)
		}
		if x, ok := d.(disk.Zeroer); ok {
			require.Error(t, x.Zero(t.Context(), off, 1024), "a zeroing of 1024 bytes at %d", off)
		}
		if x, ok := d.(disk.Extenter); ok {
			_, err := x.Extent(t.Context(), off, 1024)
			require.Error(t, err, "an extent of 1024 bytes at %d", off)
		}
	}
	require.Equal(t, size, d.Size())
}

// testNoAllocation checks that the path of every command allocates nothing.
func testNoAllocation(t *testing.T, d disk.Disk) {
	p := pattern(4096, 1)
	write(t, d, p, 0)
	// The disk's background work may allocate, so one round without is enough.
	least := 1.0
	for round := 0; round < 20 && least > 0; round++ {
		least = min(least, testing.AllocsPerRun(50, func() {
			if _, err := d.WriteAt(t.Context(), p, 0); err != nil {
				t.Error(err)
			}
			if _, err := d.ReadAt(t.Context(), p, 0); err != nil {
				t.Error(err)
			}
		}))
	}
	require.Zero(t, least, "a write and a read allocate")
}

// testDistance checks what a far disk does without time to wait.
func testDistance(t *testing.T, d disk.Disk) {
	if !disk.Far(d) {
		t.Skip("the disk is not far")
	}
	want := pattern(minSize/2, 1)
	write(t, d, want, 0)
	got := make([]byte, minSize/2)
	_, err := d.ReadAt(disk.AtHand, got, 0)
	require.NoError(t, err)
	require.Equal(t, want, got, "what was written is at hand")
	_, err = d.WriteAt(disk.AtHand, want[:4096], 8192)
	require.NoError(t, err)
	require.Equal(t, want[:4096], read(t, d, 8192, 4096))

	before := read(t, d, minSize-4096, 4096) // of a disk that may have forgotten it since
	part := pattern(1024, 2)
	n, err := d.WriteAt(disk.AtHand, part, minSize-4096+512)
	if err != nil {
		require.ErrorIs(t, err, disk.ErrNotNow)
	} else {
		require.Equal(t, len(part), n)
	}
	copy(before[512:], part[:n])
	require.Equal(t, before, read(t, d, minSize-4096, 4096))
}
