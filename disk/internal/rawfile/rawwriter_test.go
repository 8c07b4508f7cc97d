package rawfile

import (
	"bytes"
	"context"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// TestPaceTakesTheFasterWay writes at invented speeds, in megabytes per second.
func TestPaceTakesTheFasterWay(t *testing.T) {
	now := time.Unix(0, 0)
	write := func(p *pace, total int64, speeds ...float64) (written [ways]int64,
		took time.Duration) {
		begin := now
		for total > 0 {
			way, n := p.choice(), int64(1<<20)
			p.begin(way, now)
			now = now.Add(time.Duration(float64(n) * 1e3 / speeds[way]))
			p.end(way, n, now)
			written[way] += n
			total -= n
		}
		return written, now.Sub(begin)
	}
	const total = 4 << 30
	t.Run("slow storage", func(t *testing.T) {
		written, took := write(newPace(true), total, 3000, 2900, 100)
		require.Less(t, written[pastCache], int64(32<<20))
		require.Less(t, took.Seconds(), 1.2*total/3e9)
	})
	t.Run("memory is hard to find", func(t *testing.T) {
		written, took := write(newPace(true), total, 300, 310, 1500)
		require.Less(t, written[smallFolios]+written[largeFolios], int64(64<<20))
		require.Less(t, took.Seconds(), 1.1*total/1.5e9)
	})
	t.Run("a small file goes through the cache", func(t *testing.T) {
		written, _ := write(newPace(true), paceSpan-1, 10, 10, 1500)
		require.Zero(t, written[pastCache])
	})
	t.Run("the faster one becomes the slower one", func(t *testing.T) {
		p := newPace(true)
		write(p, total, 3000, 2900, 1500)
		written, _ := write(p, 256<<20, 300, 310, 1500)
		require.Less(t, written[smallFolios]+written[largeFolios], int64(32<<20))
		written, _ = write(p, 256<<20, 300, 310, 100)
		require.Less(t, written[pastCache], int64(32<<20))
	})
	t.Run("the slower one becomes the faster one", func(t *testing.T) {
		p := newPace(true)
		write(p, 256<<20, 300, 310, 1500)
		written, _ := write(p, 1<<30, 3000, 1000, 1500)
		require.Greater(t, written[smallFolios], int64(512<<20))
	})
	t.Run("only the cache", func(t *testing.T) {
		written, _ := write(newPace(false), total, 10, 20, 1500)
		require.Zero(t, written[pastCache])
	})
}

func TestRawWriter(t *testing.T) {
	const chunk, chunks = 1 << 20, 12
	content := make([]byte, chunk*chunks+disk.SectorSize)
	r := rand.New(rand.NewPCG(3, 3))
	for off := 0; off < len(content); off += holeSize {
		if block := off / holeSize; block%7 < 3 || block > 600 && block < 1400 {
			p := content[off:min(off+holeSize, len(content))]
			for i := range p {
				p[i] = byte(r.Uint32())
			}
		}
	}
	for name, test := range map[string]struct{ only, shift int }{
		"any way":                     {-1, 0},
		"small folios":                {smallFolios, 0},
		"large folios":                {largeFolios, 0},
		"past the cache":              {pastCache, 0},
		"memory that storage refuses": {pastCache, 1},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "disk.raw")
			f := testtool.Must(os.Create(path))(t)
			defer f.Close()
			require.NoError(t, f.Truncate(int64(len(content))))
			direct, err := OpenDirect(f)
			if err != nil {
				t.Skip("skipped: the file system of the temporary directory has no way past the " +
					"page cache")
			}
			defer direct.Close()
			w := NewWriter(f, direct)
			w.Places = &Places{file: f}
			if test.only >= 0 {
				w.pace.rates = [ways]float64{1, 1, 1}
				w.pace.rates[test.only] = math.Inf(1)
				for way := range ways {
					w.pace.retry[way] = time.Now().Add(time.Hour)
				}
				w.pace.choose()
			}
			var group sync.WaitGroup
			var mu sync.Mutex
			total := int64(0)
			for i := 0; i < len(content); i += chunk {
				group.Go(func() {
					part := content[i:min(i+chunk, len(content))]
					p := make([]byte, chunk+1)[test.shift:][:len(part)]
					copy(p, part)
					n, err := w.Store(p, int64(i))
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					total += n
				})
			}
			group.Wait()
			expected := testtool.Must(Count(content, 0))(t)
			require.Equal(t, expected, total)
			require.True(t, bytes.Equal(content, filetest.Content(t, path)))
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.Fd()), &st))
			require.Less(t, st.Blocks*512, expected+expected/4, "zeros are holes")
			if test.only >= 0 && test.shift == 0 {
				require.Equal(t, test.only, w.pace.way)
				require.False(t, math.IsInf(w.pace.rates[test.only], 1), "the way was used")
			}
		})
	}
}

func TestLeadingRun(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		p := filetest.Sample(512*(1+r.IntN(64)), r.Uint64())
		off := int64(r.IntN(64)) * 512
		for at := 0; at < len(p); {
			zero, n := LeadingRun(p[at:], off+int64(at))
			require.Positive(t, n)
			if zero {
				require.Equal(t, make([]byte, n), p[at:at+n])
			}
			if end := off + int64(at+n); at+n < len(p) {
				require.Zero(t, end%holeSize, "runs end at blocks of the file system")
			}
			at += n
		}
	}
	require.False(t, AllZero([]byte{0, 0, 0, 0, 0, 0, 0, 0, 1}))
	require.False(t, AllZero([]byte{0, 1}))
	require.True(t, AllZero(nil))
}

// TestPreallocator checks that a large range is preallocated, still reads as zeros, and does not
// change the file's size.
func TestPreallocator(t *testing.T) {
	const size = 4 << 20
	f := filetest.Sparse(t, size)
	var none *Places
	none.before(0, size)
	guest := true
	p := &Places{file: f, busy: func() bool { return guest }}
	p.before(0, size) // beside a guest
	guest = false
	p.before(0, preallocateFrom-1)
	require.Zero(t, filetest.Allocated(t, f.Name()))
	p.before(size-preallocateFrom, preallocateFrom)
	require.EqualValues(t, preallocateFrom, filetest.Allocated(t, f.Name()))
	p.busy = nil
	p.before(0, preallocateFrom)
	require.EqualValues(t, 2*preallocateFrom, filetest.Allocated(t, f.Name()))
	require.True(t, bytes.Equal(make([]byte, size), filetest.Content(t, f.Name())))

	// If it fails once, it is not tried again.
	read := testtool.Must(os.Open(f.Name()))(t)
	defer read.Close()
	p = &Places{file: read}
	p.before(0, preallocateFrom)
	require.True(t, p.useless.Load())
	p.file = f
	p.before(1<<20, preallocateFrom)
	require.EqualValues(t, 2*preallocateFrom, filetest.Allocated(t, f.Name()))

	other := testtool.Must(os.Open("/proc/self/status"))(t)
	defer other.Close()
	require.Nil(t, NewPlaces(other, nil), "not of ext4")
}

// TestServedWriterGivesPlaces checks that writes to a served disk are preallocated, unless the
// guest is active.
func TestServedWriterGivesPlaces(t *testing.T) {
	d := testtool.Must(Open(filetest.Sparse(t, 1<<20).Name(), Options{Private: true}))(t)
	defer d.Close()
	guest := false
	w, done := d.ServedWriter(func() bool { return guest })
	defer done()
	if NewPlaces(d.File, nil) == nil {
		require.Nil(t, w.Places)
		return
	}
	require.False(t, w.Places.busy())
	guest = true
	require.True(t, w.Places.busy())
}

// placed is a file that checks that each large write finds its range allocated.
type placed struct {
	*os.File
	t     *testing.T
	large int
}

func (p *placed) WriteAt(b []byte, off int64) (int, error) {
	if len(b) >= preallocateFrom {
		p.large++
		require.GreaterOrEqual(p.t, filetest.Allocated(p.t, p.Name()),
			int64(p.large)*preallocateFrom)
	}
	return p.File.WriteAt(b, off)
}

// TestRawWriterPreallocates checks that writes through the page cache are preallocated, and that
// zeros are not.
func TestRawWriterPreallocates(t *testing.T) {
	const size = 3 << 20
	f := &placed{File: filetest.Sparse(t, size), t: t}
	w := NewWriter(f, nil)
	w.Places = &Places{file: f.File}
	content := make([]byte, size)
	for i := range 1 << 20 {
		content[i], content[2<<20+i] = byte(i)|1, byte(i)|2
	}
	require.EqualValues(t, 2<<20, testtool.Must(w.Store(content, 0))(t))
	require.EqualValues(t, 2<<20, filetest.Allocated(t, f.Name()))
	require.NotZero(t, f.large)
	require.True(t, bytes.Equal(content, filetest.Content(t, f.Name())))
}

// privateFile returns a disk over a sparse file of 8 MiB with data at 3 MiB, and the file.
func privateFile(t *testing.T, private bool) (*File, *os.File) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "disk.img"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(8<<20))
	require.NoError(t, testtool.Err(f.WriteAt(bytes.Repeat([]byte{3}, 4096), 3<<20)))
	d := testtool.Must(Open(f.Name(), Options{Private: private}))(t)
	t.Cleanup(func() {
		require.NoError(t, d.Close())
		require.NoError(t, f.Close())
	})
	return d, f
}

// byteAt reads 4 KiB, checks that all bytes are equal, and returns one of them.
func byteAt(t *testing.T, d *File, off int64) byte {
	t.Helper()
	p := bytes.Repeat([]byte{0xee}, 4096)
	n := testtool.Must(d.ReadAt(t.Context(), p, off))(t)
	require.Equal(t, len(p), n)
	require.Equal(t, bytes.Repeat(p[:1], len(p)), p)
	return p[0]
}

func TestHolesAreNotRead(t *testing.T) {
	for _, private := range []bool{true, false} {
		d, f := privateFile(t, private)
		// The test changes the file behind the disk's back, to see whether the disk asks the file.
		behind := func(off int64) {
			require.NoError(t, testtool.Err(f.WriteAt(bytes.Repeat([]byte{9}, 4096), off)))
		}
		behind(5 << 20)
		behind(3 << 20)
		want := byte(9)
		if private {
			want = 0
		}
		require.Equal(t, want, byteAt(t, d, 5<<20), "a hole when it was opened")
		require.Equal(t, byte(9), byteAt(t, d, 3<<20), "data when it was opened")
	}
}

func TestHolesEndWithAWrite(t *testing.T) {
	d, _ := privateFile(t, true)
	p := bytes.Repeat([]byte{7}, 8192)
	off := int64(6<<20 - 4096) // in two regions
	require.NoError(t, testtool.Err(d.WriteAt(t.Context(), p, off)))
	require.Equal(t, byte(7), byteAt(t, d, off))
	require.Equal(t, byte(7), byteAt(t, d, off+4096))
	require.NoError(t, d.Discard(t.Context(), off, 8192))
	require.Equal(t, byte(0), byteAt(t, d, off))
	require.NoError(t, testtool.Err(d.WriteAt(t.Context(), p[:4096], off)))
	require.Equal(t, byte(7), byteAt(t, d, off))
}

func TestHolesEndWithTheFile(t *testing.T) {
	d, _ := privateFile(t, true)
	p := make([]byte, 4096)
	require.Error(t, testtool.Err(d.ReadAt(t.Context(), p, d.Size()-2048)))
	require.Zero(t, byteAt(t, d, d.Size()-4096))
}

// manyExtents is a disk whose sectors are data and hole in turns.
type manyExtents struct {
	disk.Disk
	size  int64
	asked int
}

func (m *manyExtents) Size() int64 { return m.size }

func (m *manyExtents) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	m.asked++
	return disk.Extent{Length: min(length, 4096), Data: off/4096%2 == 0}, nil
}

func TestHolesOfAFragmentedFile(t *testing.T) {
	d := &manyExtents{size: 1 << 30}
	h := newHoleMap(d)
	require.LessOrEqual(t, d.asked, maxHoleExtents+1)
	require.False(t, h.empty(0, 1))
	require.False(t, h.empty(1<<30-1, 1), "what was not looked at counts as written")
}
