package overlay

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
)

// spoiled is an image with one unreadable block.
type spoiled struct {
	filetest.SimImage
	block int64
}

func (s *spoiled) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	bad := s.block * minGranule
	if s.block >= 0 && off < bad+minGranule && bad < off+int64(len(p)) {
		n := copy(p[:max(0, bad-off)], s.Content[off:])
		return n, &disk.MediumError{Op: "read", Off: off + int64(n), Length: int64(len(p) - n),
			Err: errors.New("input/output error")}
	}
	return s.SimImage.ReadAt(ctx, p, off)
}

// TestUnreadableBlockOfTheImage: only the unreadable block is missing. Reads and writes beside it
// work, and so does the copying. It completes when the image is readable again or the guest has
// written the block.
func TestUnreadableBlockOfTheImage(t *testing.T) {
	for _, copyReads := range []bool{false, true} {
		d := newSimDisk(t, 1, Options{CopyReads: copyReads, Unit: 4 * minGranule})
		d.over.base.img = &spoiled{SimImage: d.image, block: 5}
		p := make([]byte, minGranule)
		var medium *disk.MediumError
		require.ErrorAs(t, testtool.Err(d.over.ReadAt(t.Context(), p, 5*minGranule)), &medium)
		require.EqualValues(t, 5*minGranule, medium.Off)
		for _, block := range []int64{4, 6} {
			require.NoError(t, testtool.Err(d.over.ReadAt(t.Context(), p, block*minGranule)))
			require.Equal(t, d.expected[block*minGranule:(block+1)*minGranule], p)
		}
		n, err := d.over.WriteAt(t.Context(), make([]byte, disk.SectorSize), 5*minGranule)
		require.ErrorAs(t, err, &medium, "the rest of the block is not known")
		require.Zero(t, n, "wherever storage failed, nothing is stored")

		require.ErrorAs(t, d.hydrate.pass(t.Context()), &medium)
		require.EqualValues(t, 1, d.over.blocks.clear.Load(), "everything else is copied")
		progress := new(image.Progress)
		d.hydrate.progress = progress
		ctx, stop := context.WithCancel(t.Context())
		ended := testtool.Go(func() error { return d.hydrate.run(ctx) })
		testtool.Eventually(t, func() bool { return progress.Missing() != nil }, "people see it")
		stop()
		require.ErrorIs(t, <-ended, context.Canceled)
		require.ErrorAs(t, progress.Missing(), &medium)
		_, err = d.over.WriteAt(t.Context(), make([]byte, minGranule), 5*minGranule)
		require.NoError(t, err, "a whole block needs nothing of the image")
		require.NoError(t, d.hydrate.run(t.Context()))
		require.NoError(t, progress.Missing())
		d.over.base.drop()
		clear(d.expected[5*minGranule : 6*minGranule])
		require.Equal(t, d.expected, filetest.Read(t, d.over, 0, simSize))
	}
}

// TestWholeBlocksReadNothing: a write of whole blocks does not read the image. Any other write
// reads only the blocks at its ends.
func TestWholeBlocksReadNothing(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	counted := &counting{Image: d.image}
	d.over.base.img = counted
	filetest.Write(t, d.over, make([]byte, 3*minGranule), 4*minGranule)
	require.Zero(t, counted.reads)
	require.NoError(t, d.over.Discard(t.Context(), 20*minGranule, 2*minGranule))
	require.Zero(t, counted.reads)
	filetest.Write(t, d.over, make([]byte, 3*minGranule), 24*minGranule+disk.SectorSize)
	require.Equal(t, 2, counted.reads)
}

// stored is an image that stores its zeros too.
type stored struct{ filetest.SimImage }

func (s stored) Extent(_ context.Context, _, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// punching is a file that records its holes.
type punching struct {
	*filetest.SimFile
	at []int64
}

func (p *punching) Discard(ctx context.Context, off, length int64) error {
	p.at = append(p.at, off)
	return p.SimFile.Discard(ctx, off, length)
}

// TestHydrationPunchesWhatIsThere: zeros of the image become holes of the file, even over the rest
// of a lost write. Where the file has nothing, nothing is done.
func TestHydrationPunchesWhatIsThere(t *testing.T) {
	content := newSimDisk(t, 1, Options{}).image
	file := &punching{SimFile: filetest.NewSimFile(&filetest.Machine{CrashIn: -1},
		make([]byte, simSize))}
	clear(content.Content[9*minGranule : 10*minGranule])
	// the end of a hole of the image: every fifth block is one
	filetest.Write(t, file, filetest.Block('x', minGranule), 9*minGranule)
	require.NoError(t, over(t, file, stored{content}, Options{}).Copy(t.Context(),
		CopyOptions{Slots: slots.New(4, slots.Options{})}))
	require.Equal(t, content.Content, file.Cache)
	require.Equal(t, []int64{8 * minGranule}, file.at)
}

// TestCopyingBeginsSlowly: the first reads of the guest come first, because copying would take the
// processors that they need.
func TestCopyingBeginsSlowly(t *testing.T) {
	over := newSimDisk(t, 1, Options{}).over
	h := newHydration(over, CopyOptions{Slots: slots.New(4, slots.Options{})})
	testtool.Eventually(t, func() bool { // this machine may be slow
		h.begin(time.Now())
		return h.o.watch.active()
	})
	h.begin(time.Now().Add(-FirstReads))
	require.False(t, h.o.watch.active())
}

type counting struct {
	Image
	reads int
}

func (c *counting) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	c.reads++
	return c.Image.ReadAt(ctx, p, off)
}

// TestHydrationFollowsTheGuest: the guest's last read is copied first, and the blocks after it
// next.
func TestHydrationFollowsTheGuest(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	d.hydrate.chunk = 2 * minGranule
	_, err := d.over.ReadAt(t.Context(), make([]byte, disk.SectorSize), 20*minGranule)
	require.NoError(t, err)
	var order []int64
	for {
		first, last, ok := d.hydrate.next(t.Context())
		if !ok {
			break
		}
		order = append(order, first)
		require.NoError(t, d.hydrate.copyChunk(t.Context(), make([]byte, d.hydrate.chunk), first,
			last))
	}
	require.Equal(t, []int64{20, 22, 24}, order[:3])
	require.Zero(t, d.over.blocks.clear.Load())
}

// TestHydrationLeavesProcessorsToTheGuest: beside a guest, only one worker copies.
func TestHydrationLeavesProcessorsToTheGuest(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	d.hydrate.workers, d.hydrate.slots = 3, slots.New(3, slots.Options{})
	var helpers sync.WaitGroup
	all := d.over.blocks.clear.Load()
	done := d.hydrate.o.watch.wait()
	d.hydrate.recruit(t.Context(), &helpers)
	helpers.Wait()
	require.Equal(t, all, d.over.blocks.clear.Load())
	done()
	require.True(t, d.hydrate.o.watch.active())
	// The machine's clock is set back: that is no guest.
	d.hydrate.o.watch.activeAt.Store(time.Now().Add(time.Hour).UnixNano())
	d.hydrate.recruit(t.Context(), &helpers)
	helpers.Wait()
	require.Zero(t, d.over.blocks.clear.Load())
}

// TestWatchingTheDiskIsNoGuest: an active guest slows the copying down. Monitoring often asks with
// an empty write whether the disk has failed; that does not count.
func TestWatchingTheDiskIsNoGuest(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	filetest.Write(t, d.over, nil, 0)
	require.False(t, d.hydrate.o.watch.active())
	for name, act := range map[string]func() error{
		"read": func() error {
			_, err := d.over.ReadAt(t.Context(), make([]byte, disk.SectorSize), 0)
			return err
		},
		"write": func() error {
			_, err := d.over.WriteAt(t.Context(), make([]byte, disk.SectorSize), 0)
			return err
		},
		"discard": func() error { return d.over.Discard(t.Context(), 0, disk.SectorSize) },
		"zero":    func() error { return d.over.Zero(t.Context(), 0, disk.SectorSize) },
	} {
		d.hydrate.o.watch.activeAt.Store(0)
		require.NoError(t, act())
		require.True(t, d.hydrate.o.watch.active(), name)
	}
}

// TestWatchingTheDiskWaitsForNoFreeze: a change of the layers may wait for storage that hangs, and
// the probes of the daemon must not.
func TestWatchingTheDiskWaitsForNoFreeze(t *testing.T) {
	s := NewStack(newSimDisk(t, 1, Options{}).over)
	s.Freeze()
	defer s.Thaw()
	filetest.Write(t, s, nil, 0)
}

// largerDisk makes a disk that is larger than its image, which ends within a block. It returns the
// disk's content too.
func largerDisk(t *testing.T, opt Options) (d *Disk, want []byte) {
	image := newSimDisk(t, 1, opt).image
	want = append(bytes.Clone(image.Content), make([]byte, 6*minGranule-3*disk.SectorSize)...)
	file := filetest.NewSimFile(&filetest.Machine{CrashIn: -1}, make([]byte, len(want)))
	return over(t, file, image, opt), want
}

// TestDiskLargerThanItsImage: the file has only a part of the image's last block. Around it the
// disk has the writes, the image, and zeros behind that, whatever was in the buffers.
func TestDiskLargerThanItsImage(t *testing.T) {
	const last = 34 * minGranule // the begin of the image's last block
	for _, opt := range []Options{{}, {CopyReads: true, Unit: 2 * minGranule}} {
		for off := int64(last - disk.SectorSize); off <= last+minGranule; off += disk.SectorSize {
			for _, length := range []int64{disk.SectorSize, 2 * disk.SectorSize, minGranule,
				2*minGranule + disk.SectorSize} {
				for _, op := range []change{changeWrite, changeDiscard, changeZero} {
					over, want := largerDisk(t, opt)
					buf := over.scratch.Get().(*[]byte)
					copy(*buf, filetest.Block('s', len(*buf)))
					over.scratch.Put(buf)
					p := filetest.Block('w', int(length))
					var err error
					switch op {
					case changeWrite:
						_, err = over.WriteAt(t.Context(), p, off)
					case changeDiscard:
						clear(p)
						err = over.Discard(t.Context(), off, length)
					case changeZero:
						clear(p)
						err = over.Zero(t.Context(), off, length)
					}
					require.NoError(t, err)
					copy(want[off:], p)
					require.Equal(t, -1,
						filetest.FirstDifference(want, filetest.ReadAll(t, over, over.Size())),
						"%v of %d bytes at %d", op, length, off-last)
					copying := newHydration(over, CopyOptions{Slots: slots.New(4, slots.Options{})})
					require.NoError(t, copying.pass(t.Context()))
					over.base.drop()
					require.Equal(t, -1,
						filetest.FirstDifference(want, filetest.ReadAll(t, over, over.Size())),
						"copied after %v of %d bytes at %d", op, length, off-last)
				}
			}
		}
	}
}

// halves is an image that stores only half of each block, like one with small clusters.
type halves struct {
	filetest.SimImage
	stored int64 // which half
}

func (h halves) Extent(_ context.Context, off, length int64) (disk.Extent, error) {
	end := (off/(minGranule/2) + 1) * (minGranule / 2)
	return disk.Extent{Length: min(length, end-off), Data: off/(minGranule/2)%2 == h.stored}, nil
}

// TestHolesThatAreNoWholeBlocks: a block counts as copied only if the image stores nothing of it.
func TestHolesThatAreNoWholeBlocks(t *testing.T) {
	for half, want := range []int64{35, 34} { // the last block ends before its second half
		blocks := newBlockMap(blocksOf(simSize))
		img := halves{newSimDisk(t, 1, Options{}).image, int64(half)}
		held := testtool.Must(markHoles(t.Context(), img, blocks, true))(t)
		require.Equal(t, want*minGranule, held)
		require.Equal(t, want, blocks.clear.Load())
	}
}

// TestGivingBackSparesTheGuest: giveBack waits for a guest that is writing, because its block is
// not marked yet. It leaves marked blocks alone.
func TestGivingBackSparesTheGuest(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	filetest.Write(t, d.over, filetest.Block('g', minGranule), 7*minGranule)
	held := d.over.locks.lock(5, 5)
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.over.giveBack(4, 6)
	}()
	testtool.Waits(t, done, "giveBack did not wait")
	filetest.Write(t, d.file, filetest.Block('g', minGranule), 5*minGranule)
	require.NoError(t, d.over.mark(5, 5))
	d.over.locks.unlock(held)
	<-done
	for _, written := range []int64{5, 7} {
		p := filetest.Read(t, d.over, written*minGranule, minGranule)
		require.Equal(t, filetest.Block('g', minGranule), p)
	}
}

// TestMapsAreDroppedAfterTheLastChange: the files of the map are closed only when no write is about
// to save a change, which would fail.
func TestMapsAreDroppedAfterTheLastChange(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	held := d.over.locks.lock(3, 3)
	dropped := testtool.Go(d.over.dropMaps)
	testtool.Waits(t, dropped, "dropMaps did not wait")
	d.over.locks.unlock(held)
	require.NoError(t, <-dropped)
}

// TestMapsOfLargeImages: the map of the largest images stays small, and its bits add up.
func TestMapsOfLargeImages(t *testing.T) {
	for size, granule := range map[int64]int64{1 << 20: 4 << 10, 1 << 40: 4 << 10,
		1<<40 + 1: 8 << 10, 16 << 40: 64 << 10, 64 << 40: 256 << 10} {
		require.Equal(t, granule, granuleFor(size))
		require.LessOrEqual(t, blocksOf(size), int64(maxMapBlocks))
	}
	m := newBlockMap(3*mapPageBlocks + 5)
	require.NoError(t, m.set(10, 2*mapPageBlocks+3, nil))
	require.EqualValues(t, 3*mapPageBlocks+5-(2*mapPageBlocks-6), m.clear.Load())
	set, end := m.run(0, m.blocks-1)
	require.False(t, set)
	require.EqualValues(t, 10, end)
	set, end = m.run(10, m.blocks-1)
	require.True(t, set)
	require.EqualValues(t, 2*mapPageBlocks+4, end)
	require.Equal(t, m.full, m.pages[1].Load(), "a page that is all set takes no memory")
	require.EqualValues(t, 2*mapPageBlocks+4, m.nextClear(10))
	require.NoError(t, m.set(0, m.blocks-1, nil))
	require.Zero(t, m.clear.Load())
	require.True(t, m.allSet(0, m.blocks-1))
	require.Equal(t, m.blocks, m.nextClear(0))
}

// TestCopyingToAFullVolumeTakesNothing: if the space is too small for a chunk, copying leaves it to
// the guest and to the small files beside the disk.
func TestCopyingToAFullVolumeTakesNothing(t *testing.T) {
	const size = 4 << 20
	full := filetest.TinyFS(t, "1536k")
	img := openGood(t, filetest.Put(t, t.TempDir(), "a.raw", filetest.Block('a', size), 0))
	file := testtool.Must(rawfile.Open(filetest.Put(t, full, "disk.img", nil, size),
		rawfile.Options{Private: true}))(t)
	defer file.Close()
	blocks := newBlockMap(blocksOf(size))
	maps := newMapStore(len(blocks.pages))
	over := newDisk(file, img, blocks, maps, size, Options{})
	filetest.Write(t, over, filetest.Block('b', 64<<10), 1<<20)
	progress := new(image.Progress)
	h := newHydration(over, CopyOptions{Slots: slots.New(4, slots.Options{}), Progress: progress})
	slot := testtool.Must(h.slots.Acquire(t.Context()))(t)
	defer slot.Release()
	for range 5 {
		_, _ = h.step(t.Context(), slot)
	}
	require.True(t, h.paused.Load())
	require.True(t, progress.Waiting())
	require.EqualValues(t, (size-1<<20-64<<10)/minGranule, blocks.clear.Load(),
		"one chunk has found space")
	require.EqualValues(t, 512<<10-64<<10, testtool.Must(osfile.AvailableSpace(full))(t))
	require.NoError(t, durable.Replace(nil, filepath.Join(full, "state"), filetest.Block('s', 4096),
		"", nil))
	filetest.Write(t, over, filetest.Block('c', 256<<10), 3<<20)
	want := filetest.Block('a', size)
	copy(want[1<<20:], filetest.Block('b', 64<<10))
	copy(want[3<<20:], filetest.Block('c', 256<<10))
	require.Equal(t, -1, filetest.FirstDifference(want, filetest.ReadAll(t, over, size)))
}
