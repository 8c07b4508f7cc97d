package instance

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/osfile"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/disk/internal/smallfile"
)

// unreadable makes every read of a file that this process has open fail, until back is called.
func unreadable(t *testing.T, path string) (back func()) {
	fd := -1
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if name, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && name == path {
			fd, err = strconv.Atoi(e.Name())
			require.NoError(t, err)
		}
	}
	require.NotEqual(t, -1, fd, "%s is not open", path)
	other, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer other.Close()
	good, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Dup3(int(other.Fd()), fd, unix.O_CLOEXEC))
	return func() {
		require.NoError(t, unix.Dup3(good, fd, unix.O_CLOEXEC))
		require.NoError(t, unix.Close(good))
	}
}

// identifying is what is to identify an image of one backing file, and what it logs.
func identifying(t *testing.T) (*background, *observer.ObservedLogs) {
	dir := t.TempDir()
	content := filetest.Block('a', 3<<20)
	filetest.Put(t, dir, "base.raw", content, 0)
	filetest.QemuImg(t, dir, "create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2")
	img := openGood(t, filepath.Join(dir, "top.qcow2"))
	work, err := openWorkDir(t.TempDir(), "top.qcow2", false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, work.close()) })
	core, logs := observer.New(zap.WarnLevel)
	return &background{img: img, dir: work, log: zap.New(core), retry: time.Millisecond, workers: NewWorkers(), state: &state{Chain: img.Unhashed()}}, logs
}

// An image that cannot be read for a while is known at the next start all the same: otherwise the disk is made again, or refused.
func TestImageIsIdentifiedAfterErrors(t *testing.T) {
	b, logs := identifying(t)
	want, err := b.img.Fingerprint(t.Context(), b.img.Hashes(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	back := unreadable(t, filepath.Join(filepath.Dir(b.img.Path()), "base.raw"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.keepIdentifying(t.Context(), t.Context(), b.img.Hashes(nil))
	}()
	require.Eventually(t, func() bool { return logs.Len() > 1 }, 10*time.Second, time.Millisecond)
	back()
	<-done
	require.Equal(t, want, b.state.Chain)
	require.False(t, b.unsaved)
	require.Zero(t, logs.FilterMessage("a later start will not know the image again").Len())
}

// What is known of an image is saved also where there are no descriptors for a while, as when very many connect: otherwise a later start
// makes the disk again, or refuses it.
func TestImageIsIdentifiedWithoutDescriptors(t *testing.T) {
	b, logs := identifying(t)
	restore := limitDescriptors(t, 0)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.keepIdentifying(t.Context(), t.Context(), b.img.Hashes(nil))
	}()
	select {
	case <-done: // it gave up
	case <-time.After(spaceRetry / 4):
	}
	restore()
	<-done
	require.Zero(t, logs.Len())
	require.False(t, b.unsaved)
	require.FileExists(t, b.dir.state())
}

// Copying to a full volume leaves the guest, and what is kept beside the disk, the space that does not suffice for a chunk.
func TestCopyingToAFullVolumeTakesNothing(t *testing.T) {
	const size = 4 << 20
	full := filetest.TinyFS(t, "1536k")
	img := openGood(t, filetest.Put(t, t.TempDir(), "a.raw", filetest.Block('a', size), 0))
	file, err := rawfile.Open(filetest.Put(t, full, "disk.img", nil, size), rawfile.Options{Private: true})
	require.NoError(t, err)
	defer file.Close()
	blocks := newBlockMap(blocksOf(size))
	maps := newMapStore(len(blocks.pages))
	over := newOverlay(file, img, blocks, maps, size, overlayOptions{})
	_, err = over.WriteAt(filetest.Block('b', 64<<10), 1<<20)
	require.NoError(t, err)
	h := newHydration(over, zap.NewNop(), 0, slots.New(4, slots.Options{}))
	progress := new(image.Progress)
	h.progress = progress
	slot, err := h.slots.Acquire(t.Context())
	require.NoError(t, err)
	defer slot.Release()
	for range 5 {
		_, _ = h.step(t.Context(), slot)
	}
	require.True(t, h.paused.Load())
	require.True(t, progress.Waiting())
	require.EqualValues(t, (size-1<<20-64<<10)/minGranule, blocks.clear.Load(), "one chunk has found space")
	left, err := osfile.AvailableSpace(full)
	require.NoError(t, err)
	require.EqualValues(t, 512<<10-64<<10, left)
	require.NoError(t, smallfile.Replace(filepath.Join(full, "state"), filetest.Block('s', 4096), "", nil))
	_, err = over.WriteAt(filetest.Block('c', 256<<10), 3<<20)
	require.NoError(t, err)
	want := filetest.Block('a', size)
	copy(want[1<<20:], filetest.Block('b', 64<<10))
	copy(want[3<<20:], filetest.Block('c', 256<<10))
	require.Equal(t, -1, filetest.FirstDifference(want, filetest.ReadAll(t, over, size)))
}

// A disk whose blocks are all copied has its maps until its state says that it is complete. That it never does where the image was changed
// meanwhile: nobody can tell what was copied.
func TestMapsStayUntilTheDiskIsComplete(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
	inst, _ := start(t, path, Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite})
	inst.copies.done.Wait()
	require.NoError(t, newHydration(inst.Disk.(*overlay), zap.NewNop(), 0, slots.New(4, slots.Options{})).run(t.Context()))
	incomplete := func() {
		t.Helper()
		require.Error(t, inst.copies.complete())
		s, err := loadState(inst.dir.state())
		require.NoError(t, err)
		require.False(t, s.Complete)
		require.FileExists(t, inst.dir.liveMap())
		require.FileExists(t, inst.dir.durableMap())
	}
	inTheWay := inst.dir.state() + smallfile.PartialSuffix
	require.NoError(t, os.Mkdir(inTheWay, 0o700))
	incomplete()
	require.NoError(t, os.Remove(inTheWay))
	require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)))
	incomplete()
}

// A disk that is copied is not kept from being complete by an image that cannot be read, as in a part that holds nothing of the disk.
func TestCompleteDiskDoesNotWaitForItsImage(t *testing.T) {
	b, logs := identifying(t)
	defer unreadable(t, filepath.Join(filepath.Dir(b.img.Path()), "base.raw"))()
	b.retry = time.Hour
	copying, copied := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.keepIdentifying(t.Context(), copying, b.img.Hashes(nil))
	}()
	require.Eventually(t, func() bool { return logs.Len() == 1 }, 10*time.Second, time.Millisecond)
	copied()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it goes on")
	}
	require.False(t, image.Identified(b.state.Chain))
	require.Equal(t, 1, logs.FilterMessage("a later start will not know the image again").Len())
}
