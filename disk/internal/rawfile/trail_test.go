package rawfile

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// guestFile is a file of 8 MiB with data at 3 MiB that a guest uses.
func guestFile(t *testing.T, private bool) *File {
	t.Helper()
	_, f := privateFile(t, private)
	d := testtool.Must(Open(f.Name(), Options{Private: private, Guest: true}))(t)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// at is the cell of a map in which an offset lies.
func at(m *disk.Map, off int64) disk.Cell { return m.Cells[off/m.CellBytes] }

func TestMapOfAFile(t *testing.T) {
	const data = 3 << 20
	for _, private := range []bool{true, false} {
		d := guestFile(t, private)
		m := d.Map()
		require.Equal(t, int64(4096), m.CellBytes)
		require.Equal(t, disk.Cell{Hole: 4096}, at(m, 0))
		if private {
			require.Equal(t, disk.Cell{Copied: 4096}, at(m, data), "of an earlier start")
		} else {
			require.Equal(t, disk.Cell{Image: 4096}, at(m, data), "the file is the image")
		}
		// Holes are remembered in larger parts.
		require.EqualValues(t, 8<<20-minHoleRegion, m.Total().Hole)

		filetest.Write(t, d, make([]byte, 512), 5<<20)
		filetest.Write(t, d, make([]byte, 512), data)
		m = d.Map()
		require.Equal(t, disk.Cell{Written: 4096}, at(m, 5<<20))
		require.Equal(t, disk.Cell{Written: 4096}, at(m, data))

		require.NoError(t, d.Discard(t.Context(), data, 8192))
		require.Equal(t, disk.Cell{Hole: 4096}, at(d.Map(), data))
		require.NoError(t, d.Discard(t.Context(), 5<<20, 512))
		require.Equal(t, disk.Cell{Written: 4096}, at(d.Map(), 5<<20), "the rest was not discarded")
		filetest.Write(t, d, make([]byte, 512), data)
		m = d.Map()
		require.EqualValues(t, 4096, at(m, data).Written)
		require.EqualValues(t, 8192, m.Total().Written)
	}
}

func fixed(size int64) func() int64 { return func() int64 { return size } }

// TestMapOfAFileThatGrows checks that the guest's work stays on the map when the cells become
// larger.
func TestMapOfAFileThatGrows(t *testing.T) {
	d := guestFile(t, true)
	d.Map() // from now on reads are remembered
	filetest.Write(t, d, make([]byte, 512), 5<<20)
	require.NoError(t, d.Discard(t.Context(), 0, 1<<20))
	require.NoError(t, d.Grow(64<<20))
	require.NoError(t, testtool.Err(d.ReadAt(t.Context(), make([]byte, 512), 60<<20)))
	m := d.Map()
	require.EqualValues(t, 64<<20, m.Size)
	require.EqualValues(t, 16<<10, m.CellBytes)
	require.EqualValues(t, 16<<10, at(m, 5<<20).Written)
	filetest.Write(t, d, make([]byte, 512), 60<<20)
	require.NoError(t, d.Discard(t.Context(), 3<<20, minHoleRegion))
	m = d.Map()
	require.EqualValues(t, 16<<10, at(m, 5<<20).Written)
	require.EqualValues(t, 16<<10, at(m, 60<<20).Written)
	require.EqualValues(t, 16<<10, at(m, 3<<20).Hole)
	require.EqualValues(t, 32<<10, m.Total().Written)
}

// TestMapTellsRecentReads checks that reads show while somebody looks, and that a first look shows
// none.
func TestMapTellsRecentReads(t *testing.T) {
	trail, m := NewTrail(fixed(8<<20)), disk.NewMap(8<<20)
	now := time.Now()
	look := func(after time.Duration) *disk.Map {
		now = now.Add(after)
		trail.Mark(m, now)
		return m
	}
	trail.Read(0, 512)
	require.False(t, look(0).Total().Read, "nobody has looked yet")
	trail.Read(1<<20, 512)
	require.True(t, at(look(time.Second), 1<<20).Read)
	require.True(t, at(look(time.Millisecond), 1<<20).Read, "to another who asks")
	require.False(t, look(time.Second).Total().Read)
	trail.Read(2<<20, 8192)
	m = look(time.Second)
	require.True(t, at(m, 2<<20).Read)
	require.True(t, at(m, 2<<20+4096).Read)
	require.False(t, at(m, 2<<20+8192).Read)
	trail.Read(3<<20, 512)
	require.False(t, look(time.Minute).Total().Read, "that may be long ago")
}

// TestTrailAgainstAModel compares a trail with the work on each region.
func TestTrailAgainstAModel(t *testing.T) {
	const size = 1<<20 + 512
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		trail := NewTrail(fixed(size))
		written := make([]bool, (size+4095)/4096)
		gone := make([]bool, len(written))
		for range 50 {
			off := r.Int64N(size/512) * 512
			length := min(size-off, (1+r.Int64N(64))*512)
			discard := r.IntN(2) == 0
			if discard {
				trail.Discard(off, length)
			} else {
				trail.Write(off, length)
			}
			for i := range written {
				begin, end := int64(i)*4096, min(int64(i+1)*4096, size)
				switch {
				case discard && off <= begin && end <= off+length:
					written[i], gone[i] = false, true
				case !discard && begin < off+length && off < end:
					written[i], gone[i] = true, false
				}
			}
		}
		m := disk.NewMap(size)
		for i := range m.Cells {
			_, m.Cells[i].Copied = m.Range(i)
		}
		trail.Mark(m, time.Now())
		for i := range m.Cells {
			_, length := m.Range(i)
			want := disk.Cell{Copied: length}
			if written[i] {
				want = disk.Cell{Written: length}
			} else if gone[i] {
				want = disk.Cell{Hole: length}
			}
			require.Equal(t, want, m.Cells[i], "seed %d, cell %d", seed, i)
		}
	}
}

func TestNoTrail(t *testing.T) {
	var trail *Trail
	trail.Write(0, 1)
	trail.Read(0, 1)
	trail.Discard(0, 4096)
	trail.Mark(disk.NewMap(1<<20), time.Now())
}

// TestMapBesideAGuest checks that a map adds up while the guest works.
func TestMapBesideAGuest(t *testing.T) {
	d := guestFile(t, true)
	var guests sync.WaitGroup
	for g := range uint64(4) {
		guests.Go(func() {
			r := rand.New(rand.NewPCG(g, 2))
			for range 500 {
				off := r.Int64N(8<<20/4096) * 4096
				switch r.IntN(3) {
				case 0:
					_, _ = d.WriteAt(t.Context(), make([]byte, 4096), off)
				case 1:
					_, _ = d.ReadAt(t.Context(), make([]byte, 4096), off)
				default:
					_ = d.Discard(t.Context(), off, 4096)
				}
			}
		})
	}
	for range 50 {
		m := d.Map()
		for i, c := range m.Cells {
			_, length := m.Range(i)
			require.Equal(t, length, c.Image+c.Copied+c.Written+c.Hole)
			require.GreaterOrEqual(t, min(c.Image, c.Copied, c.Written, c.Hole), int64(0))
		}
	}
	guests.Wait()
}

// BenchmarkTrail measures what the map of a disk costs each read and write of a guest, while nobody
// looks at it, and while somebody does.
func BenchmarkTrail(b *testing.B) {
	const size = 64 << 30
	for _, c := range []struct {
		name string
		look bool
		do   func(t *Trail, off int64)
	}{
		{"read", false, func(t *Trail, off int64) { t.Read(off, 4096) }},
		{"read, watched", true, func(t *Trail, off int64) { t.Read(off, 4096) }},
		{"write", false, func(t *Trail, off int64) { t.Write(off, 4096) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			t := NewTrail(func() int64 { return size })
			if c.look {
				t.recent(size, time.Now())
			}
			off := int64(0)
			for b.Loop() {
				c.do(t, off)
				off = (off + 40961<<12) % size
			}
		})
	}
}

// TestRegionsGrow: a set that has grown several times keeps the regions from before and after.
func TestRegionsGrow(t *testing.T) {
	const region = 1 << 20
	size := int64(3 * region)
	s := NewRegions(size, region)
	s.Add(region, 1)
	for _, next := range []int64{4, 64, 65, 200, 1000, 1001} {
		before := size
		size = next * region
		s.grow(size)
		require.False(t, s.touches(before, size-before), "the new part is empty")
		s.Add(size-1, 1)
		require.True(t, s.Covers(size-1, 1))
	}
	require.True(t, s.touches(region, 1))
	require.False(t, s.touches(2*region, region))
	s.Add(0, size)
	require.True(t, s.Covers(0, size))
}

// TestGrow: readers and writers go on while a file grows, the new part reads as zeros and can be
// written at once, also past the page cache.
func TestGrow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
	f := testtool.Must(Open(path, Options{Private: true, Durable: true}))(t)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	stop := make(chan struct{})
	var beside sync.WaitGroup
	beside.Go(func() {
		for n := byte(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			at := f.Size() - 4096
			want, got := bytes.Repeat([]byte{n | 1}, 4096), make([]byte, 4096)
			if _, err := f.WriteAt(t.Context(), want, at); err != nil {
				t.Error(err)
				return
			}
			if _, err := f.ReadAt(t.Context(), got, at); err != nil || !bytes.Equal(got, want) {
				t.Error("what was written is not read", err)
				return
			}
		}
	})
	for size := int64(2 << 20); size <= 300<<20; size += 7<<20 + 512 {
		before := f.Size()
		require.NoError(t, f.Grow(size))
		require.Equal(t, size, f.Size())
		require.Equal(t, make([]byte, 8192), filetest.Read(t, f, before, 8192))
	}
	close(stop)
	beside.Wait()
	w, done := f.ServedWriter(func() bool { return false })
	size := f.Size()
	require.NoError(t, f.Grow(size+8<<20))
	_, err := w.Store(bytes.Repeat([]byte{9}, 4<<20), size/(2<<20)*(2<<20)+2<<20)
	require.NoError(t, err)
	done()
	require.Error(t, f.Grow(size), "it never becomes smaller")
	require.Error(t, f.Grow(size+8<<20+100))
	st := testtool.Must(os.Stat(path))(t)
	require.Equal(t, f.Size(), st.Size())

	readOnly := testtool.Must(Open(path, Options{ReadOnly: true}))(t)
	defer readOnly.Close()
	require.ErrorIs(t, readOnly.Grow(1<<30), disk.ErrReadOnly)
}
