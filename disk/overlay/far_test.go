package overlay

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/sourcetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// farDisk is a disk over an image that is far away.
type farDisk struct {
	*Disk
	served  disk.Disk
	source  *sourcetest.Far
	file    *filetest.SimFile
	content []byte // of the image
}

func newFarDisk(t *testing.T, name string, packed, content []byte, source sourcetest.Options,
	opt Options) *farDisk {
	d := &farDisk{source: sourcetest.New(packed, source), content: content}
	open := func(context.Context, string) (image.Source, error) { return d.source, nil }
	img := testtool.Must(image.OpenSource(t.Context(), name, open, image.Options{}))(t)
	t.Cleanup(func() { require.NoError(t, img.Close()) })
	d.file = filetest.NewSimFile(&filetest.Machine{CrashIn: -1}, make([]byte, img.Size()))
	opt.Unit = img.CopyUnit()
	d.Disk = over(t, d.file, img, opt)
	d.served = NewStack(d.Disk)
	return d
}

// newRawDisk makes a disk over a raw image.
func newRawDisk(t *testing.T, size int64, opt sourcetest.Options) *farDisk {
	content := filetest.Sample(int(size), 3)
	return newFarDisk(t, "a.raw", content, content, opt, Options{})
}

func TestOnlyFarImagesMakeFarDisks(t *testing.T) {
	require.False(t, disk.Far(NewStack(newSimDisk(t, 1, Options{}).over)))
	require.True(t, disk.Far(newRawDisk(t, 1<<20, sourcetest.Options{}).served))
}

// TestDiskOverAFarImage does random operations on disks and compares them with a model.
func TestDiskOverAFarImage(t *testing.T) {
	const size = 4 << 20
	dir := t.TempDir()
	content := filetest.Sample(size, 4)
	clear(content[1<<20 : 1<<20+300<<10])
	filetest.Put(t, dir, "a.raw", content, 0)
	filetest.QemuImg(t, dir, "convert", "-c", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2")
	for _, name := range []string{"a.raw", "a.qcow2"} {
		for _, copyReads := range []bool{false, true} {
			packed := filetest.Content(t, filepath.Join(dir, name))
			synctest.Test(t, func(t *testing.T) {
				d := newFarDisk(t, name, packed, content,
					sourcetest.Options{Delay: 50 * time.Millisecond}, Options{CopyReads: copyReads})
				want := bytes.Clone(content)
				r := rand.New(rand.NewPCG(1, 2))
				for range 400 {
					off := r.Int64N(size/disk.SectorSize) * disk.SectorSize
					length := min((1+r.Int64N(1<<r.IntN(9)))*disk.SectorSize, size-off)
					p := make([]byte, length)
					act := func(ctx context.Context) error {
						_, err := d.served.ReadAt(ctx, p, off)
						return err
					}
					switch r.IntN(4) {
					case 0:
						act = func(ctx context.Context) error {
							return d.served.(disk.Discarder).Discard(ctx, off, length)
						}
						copy(want[off:], p)
					case 1:
						act = func(ctx context.Context) error {
							return d.served.(disk.Zeroer).Zero(ctx, off, length)
						}
						copy(want[off:], p)
					case 2:
						_, _ = rand.NewChaCha8([32]byte{byte(r.Int())}).Read(p)
						act = func(ctx context.Context) error {
							_, err := d.served.WriteAt(ctx, p, off)
							return err
						}
						copy(want[off:], p)
					}
					if err := act(disk.AtHand); err != nil {
						require.ErrorIs(t, err, disk.ErrNotNow)
						require.NoError(t, act(t.Context()))
					}
					require.True(t,
						bytes.Equal(want[off:off+length], p) || bytes.Count(p, []byte{0}) == len(p))
				}
				require.Equal(t, -1,
					filetest.FirstDifference(want, filetest.ReadAll(t, d.served, size)))
				require.NoError(t, d.Copy(t.Context(), CopyOptions{Slots: NewFarSlots()}))
				d.base.drop()
				require.Equal(t, -1,
					filetest.FirstDifference(want, filetest.ReadAll(t, d.served, size)))
			})
		}
	}
}

// TestOutOfReach uses a source that is out of reach. Calls that need nothing from it do not wait,
// even in a block that another call waits for. Calls that wait end with their context and have
// changed nothing.
func TestOutOfReach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newRawDisk(t, 4<<20, sourcetest.Options{})
		own := filetest.Block('o', minGranule)
		filetest.Write(t, d.served, own, 7*minGranule)
		d.source.Cut()
		other := d.served.(*Stack)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		const block = 20 * minGranule
		part := filetest.Block('p', disk.SectorSize)
		begin := time.Now()
		var waiting sync.WaitGroup
		for name, act := range map[string]func() error{
			"read": func() error {
				_, err := other.ReadAt(ctx, make([]byte, 1), block)
				return err
			},
			"write": func() error { _, err := other.WriteAt(ctx, part, block); return err },
			"at both": func() error {
				_, err := other.WriteAt(ctx, make([]byte, 2*minGranule), block-512)
				return err
			},
			"discard": func() error { return other.Discard(ctx, block, 512) },
			"zero":    func() error { return other.Zero(ctx, block+512, minGranule) },
		} {
			waiting.Go(func() {
				if err := act(); !errors.Is(err, disk.ErrNotNow) ||
					errors.As(err, new(*disk.MediumError)) {
					t.Errorf("%s: %v", name, err)
				}
				if time.Since(begin) != time.Hour {
					t.Errorf("%s has waited for %v", name, time.Since(begin))
				}
			})
		}
		time.Sleep(time.Minute)
		synctest.Wait()

		now := time.Now()
		require.Equal(t, own, filetest.Read(t, other, 7*minGranule, minGranule))
		filetest.Write(t, other, part, 7*minGranule+512)
		// others wait for the last three
		for _, at := range []int64{6, 8, 19, 20, 21} {
			filetest.Write(t, other, filetest.Block('w', minGranule), at*minGranule)
		}
		require.NoError(t, other.Discard(t.Context(), 30*minGranule, 5*minGranule))
		require.NoError(t, other.Flush())
		require.NoError(t, testtool.Err(other.Extent(t.Context(), 0, 1<<20)))
		depth, _ := testtool.Must2(other.Depth(t.Context(), 19*minGranule, minGranule))(t)
		require.Equal(t, disk.DepthOwn, depth)
		require.False(t, other.Slow(0))
		require.Equal(t, now, time.Now(), "none of that waited")

		waiting.Wait()
		require.Zero(t, d.source.Waiting())
		d.source.Mend()
		want := bytes.Clone(d.content)
		copy(want[6*minGranule:], filetest.Block('w', 3*minGranule))
		copy(want[7*minGranule:], own)
		copy(want[7*minGranule+512:], part)
		copy(want[19*minGranule:], filetest.Block('w', 3*minGranule))
		clear(want[30*minGranule : 35*minGranule])
		require.Equal(t, -1, filetest.FirstDifference(want,
			filetest.ReadAll(t, d.served, d.Size())))
	})
}

// TestWriteThatWaitedForItsBlock: one write covers a whole block while another one waits to write a
// part of it. Both writes are there.
func TestWriteThatWaitedForItsBlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newRawDisk(t, 1<<20, sourcetest.Options{})
		d.source.Cut()
		written := testtool.Go(func() error {
			return testtool.Err(d.served.WriteAt(t.Context(), filetest.Block('p', 512),
				5*minGranule+512))
		})
		synctest.Wait()
		filetest.Write(t, d.served, filetest.Block('w', 2*minGranule), 5*minGranule)
		d.source.Mend()
		require.NoError(t, <-written)
		want := filetest.Block('w', minGranule)
		copy(want[512:], filetest.Block('p', 512))
		require.Equal(t, want, filetest.Read(t, d.served, 5*minGranule, minGranule))
	})
}

// TestDetachingWhileSomebodyWaits detaches an image that a read still uses: no other call waits for
// that.
func TestDetachingWhileSomebodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newRawDisk(t, 1<<20, sourcetest.Options{})
		d.source.Cut()
		read := testtool.Go(func() error {
			return testtool.Err(d.served.ReadAt(t.Context(), make([]byte, 512), 0))
		})
		synctest.Wait()
		filetest.Write(t, d.served, filetest.Block('w', 1<<20), 0)
		dropped := make(chan struct{})
		go func() {
			d.base.drop()
			close(dropped)
		}()
		synctest.Wait()
		select {
		case <-dropped:
			t.Fatal("Detach did not wait")
		default:
		}
		require.Equal(t, -1, filetest.FirstDifference(filetest.Block('w', 1<<20),
			filetest.ReadAll(t, d.served, 1<<20)))
		require.NoError(t, testtool.Err(d.served.(disk.Extenter).Extent(t.Context(), 0, 512)))
		d.source.Mend()
		require.NoError(t, <-read)
		<-dropped
		require.Nil(t, d.base.begin())
	})
}

// TestCopyingAFarImage copies an image whose source is out of reach for ten minutes.
func TestCopyingAFarImage(t *testing.T) {
	const chunks = 64
	content := filetest.Sample(chunks<<20, 3)
	synctest.Test(t, func(t *testing.T) {
		d := newFarDisk(t, "a.raw", content, content,
			sourcetest.Options{Delay: time.Second, Parallel: 12}, Options{})
		core, logs := observer.New(zap.InfoLevel)
		before := d.source.Stats()
		copied := make(chan error, 1)
		begin := time.Now()
		go func() {
			copied <- d.Copy(t.Context(), CopyOptions{Slots: NewFarSlots(), Log: zap.New(core)})
		}()
		time.Sleep(2500 * time.Millisecond)
		d.source.Cut()
		done, _ := d.Copied()
		require.Greater(t, done, int64(12<<20))
		time.Sleep(time.Minute)
		require.LessOrEqual(t, d.source.Waiting(), 1, "one is enough to find out")
		asked := d.source.Stats().Reads
		time.Sleep(9 * time.Minute)
		require.Less(t, d.source.Stats().Reads-asked, 9*60/30+1)
		require.Len(t, logs.FilterLevelExact(zap.WarnLevel).All(), 1)
		d.source.Mend()
		require.NoError(t, <-copied)
		require.Equal(t, 12, d.source.Stats().Most)
		require.Less(t, time.Since(begin), 11*time.Minute)
		require.Len(t, logs.FilterMessage("the image can be read again, and is being copied").All(),
			1)
		require.Len(t, logs.FilterLevelExact(zap.WarnLevel).All(), 1)
		require.Less(t, d.source.Stats().Bytes-before.Bytes, int64((chunks+12)<<20))
		d.base.drop()
		require.Equal(t, -1, filetest.FirstDifference(content,
			filetest.ReadAll(t, d.served, d.Size())))
	})
}

// TestCopyingEndsWhileItWaits stops the copying of an image that is out of reach.
func TestCopyingEndsWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newRawDisk(t, 16<<20, sourcetest.Options{})
		d.source.Cut()
		core, logs := observer.New(zap.InfoLevel)
		ctx, cancel := context.WithCancel(t.Context())
		copied := testtool.Go(func() error {
			return d.Copy(ctx, CopyOptions{Slots: NewFarSlots(), Log: zap.New(core)})
		})
		time.Sleep(time.Second)
		now := time.Now()
		cancel()
		require.ErrorIs(t, <-copied, context.Canceled)
		require.Equal(t, now, time.Now())
		require.Empty(t, logs.All(), "a stop is no outage")
		done, _ := d.Copied()
		require.Zero(t, done, "and nothing counts as copied")
	})
}

// TestCopyingLeavesTheWayToTheGuest copies beside a guest that reads all the time.
func TestCopyingLeavesTheWayToTheGuest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newRawDisk(t, 8<<20, sourcetest.Options{Delay: 100 * time.Millisecond})
		before := d.source.Stats().Reads
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			for ctx.Err() == nil {
				_, _ = d.served.ReadAt(ctx, make([]byte, 512), 7<<20)
				time.Sleep(10 * time.Millisecond)
			}
		})
		all.Go(func() { _ = d.Copy(ctx, CopyOptions{Slots: NewFarSlots()}) })
		time.Sleep(2 * time.Second)
		require.LessOrEqual(t, d.source.Stats().Most, 2, "the guest and one worker")
		require.Greater(t, d.source.Stats().Reads, before+3)
		cancel()
		all.Wait()
	})
}

// TestFarImageThatIsGone copies the readable parts of an image, and does not ask often for the
// rest.
func TestFarImageThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newRawDisk(t, 16<<20, sourcetest.Options{})
		d.source.Lose(5<<20+100<<10, 1)
		ctx, cancel := context.WithCancel(t.Context())
		copied := make(chan error, 1)
		go func() { copied <- d.Copy(ctx, CopyOptions{Slots: NewFarSlots()}) }()
		time.Sleep(time.Minute)
		done, all := d.Copied()
		require.Equal(t, all-64<<10, done)
		_ = filetest.Read(t, d.served, 5<<20, 512)
		_, err := d.served.ReadAt(t.Context(), make([]byte, 64<<10), 5<<20+64<<10)
		var medium *disk.MediumError
		require.ErrorAs(t, err, &medium)
		require.NotErrorIs(t, err, disk.ErrNotNow)
		cancel()
		require.ErrorIs(t, <-copied, context.Canceled)

		d = newRawDisk(t, 64<<20, sourcetest.Options{})
		d.source.End(errors.New("404 not found"))
		ctx, cancel = context.WithCancel(t.Context())
		go func() { copied <- d.Copy(ctx, CopyOptions{Slots: NewFarSlots()}) }()
		time.Sleep(time.Hour)
		require.Less(t, d.source.Stats().Reads, 3600*(1+16))
		cancel()
		require.ErrorIs(t, <-copied, context.Canceled)
	})
}

// TestOutageOfManyDisks: there are no more reads, with a buffer each, than slots.
func TestOutageOfManyDisks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := NewFarSlots()
		var disks []*farDisk
		var group sync.WaitGroup
		for range 20 {
			d := newRawDisk(t, 6<<20, sourcetest.Options{Delay: time.Millisecond})
			d.source.Cut()
			disks = append(disks, d)
			group.Go(func() {
				if err := d.Copy(t.Context(), CopyOptions{Slots: shared}); err != nil {
					t.Error(err)
				}
			})
		}
		for range 100 {
			time.Sleep(7 * time.Second)
			now := 0
			for _, d := range disks {
				now += d.source.Waiting()
			}
			require.LessOrEqual(t, now, shared.Count())
		}
		for _, d := range disks {
			d.source.Mend()
		}
		group.Wait()
		require.Equal(t, shared.Count(), shared.Free())
		for _, d := range disks {
			require.Equal(t, -1, filetest.FirstDifference(d.content, d.file.Cache))
		}
	})
}
