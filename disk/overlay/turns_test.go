package overlay

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// watched is an image that counts its concurrent readers. A test can hold a read up.
type watched struct {
	Image
	now, most *atomic.Int32
	hold      func()
}

func (w *watched) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	now := w.now.Add(1)
	defer w.now.Add(-1)
	for most := w.most.Load(); now > most &&
		!w.most.CompareAndSwap(most, now); most = w.most.Load() {
	}
	if w.hold != nil {
		w.hold()
	}
	return w.Image.ReadAt(ctx, p, off)
}

// full is a file without space until the channel is closed.
type full struct {
	*filetest.SimFile
	space chan struct{}
	tries atomic.Int32
}

func (f *full) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	select {
	case <-f.space:
		return f.SimFile.WriteAt(ctx, p, off)
	default:
		f.tries.Add(1)
		return 0, disk.ErrNoSpace
	}
}

// copying makes the hydration of a small disk that shares its slots with others.
func copying(t *testing.T, shared *slots.Slots, base func(Image) Image) (*simDisk, *hydration) {
	d := newSimDisk(t, 1, Options{})
	if base != nil {
		d.over.base.img = base(d.over.base.img)
	}
	d.hydrate.slots, d.hydrate.workers = shared, shared.Count()
	return d, d.hydrate
}

func requireCopied(t *testing.T, d *simDisk) {
	require.Zero(t, d.over.blocks.clear.Load())
	d.over.base.drop()
	require.Equal(t, d.expected, filetest.Read(t, d.over, 0, simSize))
}

// TestCopyingOfManyDisksIsBounded: with any number of disks, only workers with a slot read images
// and have a buffer.
func TestCopyingOfManyDisksIsBounded(t *testing.T) {
	shared := slots.New(2, slots.Options{})
	var now, most atomic.Int32
	var group sync.WaitGroup
	var disks []*simDisk
	for range 40 {
		d, h := copying(t, shared, func(s Image) Image {
			hold := func() { time.Sleep(50 * time.Microsecond) }
			return &watched{Image: s, now: &now, most: &most, hold: hold}
		})
		disks = append(disks, d)
		group.Go(func() { require.NoError(t, h.run(t.Context())) })
	}
	group.Wait()
	require.EqualValues(t, 2, most.Load())
	require.Equal(t, 2, shared.Free(), "every slot is free again")
	for _, d := range disks {
		requireCopied(t, d)
	}
}

// TestOneDiskHasEveryPlace: a single disk has every slot, until another disk wants one.
func TestOneDiskHasEveryPlace(t *testing.T) {
	shared := slots.New(3, slots.Options{})
	var now, most atomic.Int32
	all := make(chan struct{})
	var once sync.Once
	d, h := copying(t, shared, func(s Image) Image {
		return &watched{Image: s, now: &now, most: &most, hold: func() {
			if now.Load() == 3 {
				once.Do(func() { close(all) })
			}
			select {
			case <-all:
			case <-time.After(time.Minute):
			}
		}}
	})
	require.NoError(t, h.pass(t.Context()))
	require.EqualValues(t, 3, most.Load())
	require.Equal(t, 3, shared.Free())
	requireCopied(t, d)
}

// TestStalledImageKeepsNoPlace: if the storage of some images hangs, the others are still copied.
func TestStalledImageKeepsNoPlace(t *testing.T) {
	shared := slots.New(2, slots.Options{Stall: 10 * time.Millisecond})
	var now, most atomic.Int32
	back := make(chan struct{})
	var group sync.WaitGroup
	var stalled []*simDisk
	for range 3 {
		d, h := copying(t, shared, func(s Image) Image {
			return &watched{Image: s, now: &now, most: &most, hold: func() { <-back }}
		})
		stalled = append(stalled, d)
		group.Go(func() { require.NoError(t, h.run(t.Context())) })
	}
	testtool.Eventually(t, func() bool { return now.Load() >= 2 })
	d, h := copying(t, shared, nil)
	require.NoError(t, h.run(t.Context()))
	requireCopied(t, d)
	close(back)
	group.Wait()
	require.Equal(t, 2, shared.Free())
	for _, d := range stalled {
		requireCopied(t, d)
	}
}

// TestWaitingDiskKeepsNoPlace: while one disk waits for space or for its image, others are copied.
func TestWaitingDiskKeepsNoPlace(t *testing.T) {
	shared := slots.New(1, slots.Options{})
	d, h := copying(t, shared, nil)
	file := &full{SimFile: d.file, space: make(chan struct{})}
	d.over.file = file
	h.out, h.retry = rawfile.NewServedWriter(disk.WriterAt(t.Context(), file), nil, nil,
		rawfile.ServedWorth), time.Millisecond
	copied := testtool.Go(func() error { return h.run(t.Context()) })
	testtool.Eventually(t, func() bool { return file.tries.Load() > 2 })

	_, unreadable := copying(t, shared, func(s Image) Image {
		return &spoiled{SimImage: s.(filetest.SimImage), block: 5}
	})
	ctx, cancel := context.WithCancel(t.Context())
	waiting := testtool.Go(func() error { return unreadable.run(ctx) })
	testtool.Eventually(t, func() bool { return unreadable.o.blocks.clear.Load() == 1 })

	other, h := copying(t, shared, nil)
	require.NoError(t, h.run(t.Context()))
	requireCopied(t, other)
	cancel()
	require.ErrorIs(t, <-waiting, context.Canceled)
	close(file.space)
	require.NoError(t, <-copied)
	requireCopied(t, d)
}

// TestWaitingForASlotEndsWithTheContext stops a worker that waits for a slot.
func TestWaitingForASlotEndsWithTheContext(t *testing.T) {
	shared := slots.New(1, slots.Options{})
	held := testtool.Must(shared.Acquire(t.Context()))(t)
	_, h := copying(t, shared, nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := testtool.Go(func() error { return h.run(ctx) })
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Nil(t, shared.TryAcquire(), "the slot is still held")
	held.Release()
	held.Release()
	require.Equal(t, 1, shared.Free(), "the slot is released once")
}

// TestProgressOfAllDisksIsLoggedOnce: the copying of many disks logs no more often than that of
// one.
func TestProgressOfAllDisksIsLoggedOnce(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	shared := slots.New(1, slots.Options{})
	for range 3 {
		d, h := copying(t, shared, nil)
		progress := new(image.Progress)
		progress.Follow(d.over.Size(), d.over.Copied)
		h.log, h.progress, h.begun = zap.New(core), progress, time.Now().Add(-logEvery)
		slot := testtool.Must(shared.Acquire(t.Context()))(t)
		more, _ := h.step(t.Context(), slot)
		require.True(t, more)
		slot.Release()
	}
	require.Equal(t, 1, logs.FilterMessage("copying the image").Len())
	require.False(t, shared.MayLog(time.Now(), time.Hour))
	require.True(t, shared.MayLog(time.Now().Add(logEvery), logEvery))
}

// TestBuffersAreNoLargerThanTheDisk: a buffer is no larger than its disk, so many small disks take
// little memory.
func TestBuffersAreNoLargerThanTheDisk(t *testing.T) {
	shared := slots.New(1, slots.Options{})
	_, h := copying(t, shared, nil)
	h.chunk = hydrationChunk
	slot := testtool.Must(shared.Acquire(t.Context()))(t)
	more, _ := h.step(t.Context(), slot)
	require.True(t, more)
	require.LessOrEqual(t, cap(slot.Buffer(0)), simSize+minGranule, "in whole blocks")
	slot.Release()
}

// countedWays counts how chunks are written. The guest becomes active with the first write.
type countedWays struct {
	*filetest.SimFile
	guest             func()
	anyWay, throughIt int
}

func (w *countedWays) Write(p []byte, off int64) error {
	w.anyWay++
	w.guest()
	_, err := w.WriteAt(context.Background(), p, off)
	return err
}

func (w *countedWays) WriteThrough(p []byte, off int64) error {
	w.throughIt++
	_, err := w.WriteAt(context.Background(), p, off)
	return err
}

// TestGuestThatComesBackWaitsForOneWrite: a guest may come while a chunk of many runs is written,
// and wait for a block of it. The rest of the chunk goes through the page cache.
func TestGuestThatComesBackWaitsForOneWrite(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	out := &countedWays{SimFile: d.file, guest: d.over.watch.touch}
	// with holes, and so with many runs
	d.hydrate.chunk = simSize/minGranule*minGranule + minGranule
	d.hydrate.out = out
	first, last, ok := d.hydrate.next(t.Context())
	require.True(t, ok)
	content := d.image.Content[first*minGranule:]
	require.NoError(t, d.hydrate.keep(content[:min(int64(len(content)), (last+1-first)*minGranule)],
		first*minGranule))
	require.Equal(t, 1, out.anyWay, "the others go through the cache")
	require.Positive(t, out.throughIt)
	require.Zero(t, d.over.blocks.clear.Load())
}
