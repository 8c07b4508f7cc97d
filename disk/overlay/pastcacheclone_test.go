package overlay

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// counted counts the bytes that go past the cache.
type counted struct {
	io.WriterAt
	bytes atomic.Int64
}

func (c *counted) WriteAt(p []byte, off int64) (int, error) {
	n, err := c.WriterAt.WriteAt(p, off)
	c.bytes.Add(int64(n))
	return n, err
}

// cloneGuest changes and reads random places in its own runs of a disk, and knows their content.
type cloneGuest struct {
	t      *testing.T
	over   *Disk
	want   []byte // shared: each guest uses its own runs
	number int64
	random *rand.Rand
	ops    *atomic.Int64
}

const (
	guestRun = 44 << 10 // not a divisor of the size of a copied chunk
	// at the end of the disk, so that something goes past the cache however quick the guests are
	guestsLeave = 16 << 20
)

// operate does something near the place that is being copied, mostly behind it.
func (g *cloneGuest) operate(cursor int64) {
	r, size := g.random, int64(len(g.want))
	at := cursor - r.Int64N(2<<20)
	switch r.IntN(64) {
	case 0:
		at = cursor + r.Int64N(6<<20) // a region that was not touched before
	case 1:
		at = r.Int64N(cursor + 1)
	}
	g.ops.Add(1)
	run := max(0, at) / guestRun
	if run = run/2*2 + g.number; (run+1)*guestRun > size-guestsLeave {
		return
	}
	begin, end := run*guestRun, (run+1)*guestRun
	off := begin + r.Int64N((end-begin)/disk.SectorSize)*disk.SectorSize
	length := min(1+r.Int64N(32), (end-off)/disk.SectorSize) * disk.SectorSize
	if r.IntN(2) == 0 {
		off = off / minGranule * minGranule
		length = min(minGranule, end-off)
	}
	own := g.want[off : off+length]
	var err error
	switch r.IntN(8) {
	case 0:
		clear(own)
		err = g.over.Discard(g.t.Context(), off, length)
	case 1:
		clear(own)
		err = g.over.Zero(g.t.Context(), off, length)
	case 2, 3, 4:
		got := make([]byte, length)
		if _, err = g.over.ReadAt(g.t.Context(), got, off); !bytes.Equal(own, got) {
			g.t.Errorf("%d bytes at %d are not what was there", length, off)
		}
	default:
		for i := range own {
			own[i] = byte(r.Uint32()) | 1
		}
		_, err = g.over.WriteAt(g.t.Context(), own, off)
	}
	if err != nil {
		g.t.Errorf("%d bytes at %d: %v", length, off, err)
	}
}

// TestCloneGoesPastTheCacheBesideGuests: a disk that is copied past the cache holds the guests'
// changes near the copied place, and the image everywhere else. That is what the guest reads all
// the time, and what is on storage after the last flush.
func TestCloneGoesPastTheCacheBesideGuests(t *testing.T) {
	const size, guests, copiers, opsPerChunk = 72<<20 + 3*disk.SectorSize, 2, 4, 8
	d := testtool.Must(rawfile.Open(filetest.Put(t, t.TempDir(), "disk.img", nil, size),
		rawfile.Options{Private: true, Durable: true}))(t)
	defer d.Close()
	past := d.OpenPastCache()
	if past == nil {
		t.Skip("skipped: the temporary directory is neither on ext4 nor on XFS")
	}
	defer past.Close()
	content := make([]byte, size)
	r := rand.New(rand.NewPCG(8, 8))
	for block := 0; block*minGranule < size; block++ {
		if block%97 < 80 && block%31 != 5 {
			p := content[block*minGranule : min(size, (block+1)*minGranule)]
			for i := range p {
				p[i] = byte(r.Uint32()) | 1
			}
		}
	}
	blocks := newBlockMap(blocksOf(size))
	maps := newMapStore(len(blocks.pages))
	m := &filetest.Machine{CrashIn: -1}
	empty := make([]byte, mapHeaderSize+mapPageSize)
	maps.live, maps.durable = mapFile{filetest.NewSimFile(m, empty)},
		mapFile{filetest.NewSimFile(m, empty)}
	image := filetest.SimImage{Content: content}
	held := testtool.Must(markHoles(t.Context(), image, blocks, true))(t)
	over := newDisk(d, image, blocks, maps, held, Options{})
	h := newHydration(over, CopyOptions{Slots: slots.New(4, slots.Options{})})
	direct := &counted{WriterAt: past}
	// Past the cache on any storage.
	h.out = rawfile.NewServedWriter(disk.WriterAt(t.Context(), d), direct,
		rawfile.NewPlaces(d.File, nil), 1e6)

	want := bytes.Clone(content)
	var ops, chunks atomic.Int64
	copied, flushed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(flushed)
		for {
			if err := over.Flush(); err != nil { // returns every conflict since the last one
				t.Error(err)
				return
			}
			select {
			case <-copied:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	var guesting, copying sync.WaitGroup
	for number := range int64(guests) {
		g := &cloneGuest{t, over, want, number, rand.New(rand.NewPCG(9, uint64(number))), &ops}
		guesting.Go(func() {
			for {
				select {
				case <-copied:
					return
				default:
					g.operate(chunks.Load() * h.chunk)
				}
			}
		})
	}
	for range copiers {
		copying.Go(func() {
			buf := make([]byte, h.chunk)
			for {
				first, last, ok := h.next(t.Context())
				if !ok {
					return
				}
				for ops.Load() < chunks.Load()*opsPerChunk {
					runtime.Gosched()
				}
				off := first * over.granule
				p := buf[:min((last+1)*over.granule, size)-off]
				if n, err := over.readImage(t.Context(), p, off); n < len(p) {
					t.Error(n, err)
				}
				if err := over.keep(p, off, h.out.Write); err != nil {
					t.Error(err)
					return
				}
				chunks.Add(1)
			}
		})
	}
	copying.Wait()
	close(copied)
	guesting.Wait()
	<-flushed
	require.Zero(t, blocks.clear.Load())
	t.Logf("%d MiB went past the cache beside %d calls of guests", direct.bytes.Load()>>20,
		ops.Load())
	require.Greater(t, direct.bytes.Load(), int64(guestsLeave/4))
	over.base.drop()
	require.NoError(t, over.Flush())
	requireContent := func(got []byte) {
		require.Equal(t, -1, filetest.FirstDifference(want, got))
	}
	requireContent(filetest.ReadAll(t, over, size))
	f := testtool.Must(os.Open(d.File.Name()))(t)
	defer f.Close()
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	requireContent(testtool.Must(io.ReadAll(f))(t))
}

// TestClonePreallocates: the writer of a clone learns whether a guest is active, because allocating
// space would slow the guest down.
func TestClonePreallocates(t *testing.T) {
	const size = writerFrom
	d, err := rawfile.Open(filetest.Sparse(t, size).Name(), rawfile.Options{Private: true})
	require.NoError(t, err)
	defer d.Close()
	blocks := newBlockMap(blocksOf(size))
	image := filetest.SimImage{Content: make([]byte, size)}
	over := newDisk(d, image, blocks, newMapStore(len(blocks.pages)), size, Options{})
	var busy func() bool
	opened, closed := 0, 0
	writer := func(asked func() bool) (*rawfile.Writer, func()) {
		busy, opened = asked, opened+1
		w, done := d.ServedWriter(asked)
		return w, func() { done(); closed++ }
	}
	opt := CopyOptions{Slots: slots.New(4, slots.Options{}), Writer: writer}
	require.NoError(t, over.Copy(t.Context(), opt))
	require.Equal(t, 1, opened)
	require.Equal(t, 1, closed)
	require.False(t, busy())
	over.watch.touch()
	require.True(t, busy())
}
