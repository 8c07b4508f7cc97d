package instance

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/sourcetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// unreadable makes every read of an open file of this process fail until back is called.
func unreadable(t *testing.T, path string) (back func()) {
	fd := -1
	for _, n := range filetest.Names(t, "/proc/self/fd") {
		if name, err := os.Readlink(filepath.Join("/proc/self/fd", n)); err == nil && name == path {
			fd = testtool.Must(strconv.Atoi(n))(t)
		}
	}
	require.NotEqual(t, -1, fd, "%s is not open", path)
	other := testtool.Must(os.OpenFile(path, os.O_WRONLY, 0))(t)
	defer other.Close()
	good := testtool.Must(unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0))(t)
	require.NoError(t, unix.Dup3(int(other.Fd()), fd, unix.O_CLOEXEC))
	return func() {
		require.NoError(t, unix.Dup3(good, fd, unix.O_CLOEXEC))
		require.NoError(t, unix.Close(good))
	}
}

// identifying returns the work that identifies an image with one backing file, and its log.
func identifying(t *testing.T) (*background, *observer.ObservedLogs) {
	dir := t.TempDir()
	content := filetest.Block('a', 3<<20)
	filetest.Put(t, dir, "base.raw", content, 0)
	filetest.QemuImg(t, dir, "create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2")
	img := openGood(t, filepath.Join(dir, "top.qcow2"))
	work := testtool.Must(openWorkDir(t.TempDir(), "top.qcow2", false))(t)
	t.Cleanup(func() { require.NoError(t, work.close()) })
	core, logs := observer.New(zap.WarnLevel)
	return &background{img: img, dir: work, log: zap.New(core), retry: time.Millisecond,
		workers: NewWorkers(), state: &state{Chain: img.Unhashed()}}, logs
}

// TestImageIsIdentifiedAfterErrors: if an image cannot be read for a while, the next start must
// still recognise it. Otherwise the disk is made again, or refused.
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
	testtool.Eventually(t, func() bool { return logs.Len() > 1 },
		"it has failed twice: %v", func() any { return logs.All() })
	back()
	<-done
	require.Equal(t, want, b.state.Chain)
	require.False(t, b.unsaved)
	require.Zero(t, logs.FilterMessage("a later start will not recognise the image").Len())
}

// TestImageIsIdentifiedWithoutDescriptors: the hashes of an image are saved even if descriptors run
// out for a while, as when very many initiators connect. Otherwise a later start makes the disk
// again, or refuses it.
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
	case <-time.After(scarceRetry / 4):
	}
	restore()
	<-done
	require.Zero(t, logs.Len())
	require.False(t, b.unsaved)
	require.FileExists(t, b.dir.state())
}

// TestMapsStayUntilTheDiskIsComplete: a fully copied disk keeps its maps until its state says that
// it is complete. If the image was changed meanwhile it never says so, because nobody can tell what
// was copied.
func TestMapsStayUntilTheDiskIsComplete(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
	inst, _ := start(t, path, Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite})
	inst.copies.done.Wait()
	all := overlay.CopyOptions{Slots: overlay.NewSlots()}
	require.NoError(t, inst.copies.over.Copy(t.Context(), all))
	incomplete := func() {
		t.Helper()
		require.Error(t, inst.copies.complete())
		require.False(t, stateOf(t, inst).Complete)
		require.FileExists(t, inst.dir.liveMap())
		require.FileExists(t, inst.dir.durableMap())
	}
	inTheWay := inst.dir.state() + durable.PartialSuffix
	require.NoError(t, os.Mkdir(inTheWay, 0o700))
	incomplete()
	require.NoError(t, os.Remove(inTheWay))
	require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)))
	incomplete()
}

// TestDiskIsCompleteAfterErrors: a disk whose storage failed when everything was copied does not
// need its image until the next start.
func TestDiskIsCompleteAfterErrors(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
	begin, progress := make(chan struct{}), new(image.Progress)
	inst, logs := start(t, path, Options{PersistentDir: t.TempDir(), Mode: CopyClone,
		CopyAfter: begin, Progress: progress})
	inTheWay := inst.dir.state() + durable.PartialSuffix
	testtool.Eventually(t, func() bool { return os.Mkdir(inTheWay, 0o700) == nil })
	inst.copies.retry = time.Millisecond
	close(begin)
	const failed = "the disk is copied, but that cannot be recorded: trying again"
	testtool.Eventually(t, func() bool { return logs.FilterMessage(failed).Len() > 1 },
		"it has failed twice: %v", func() any { return logs.All() })
	require.False(t, progress.Finished())
	require.NoError(t, os.Remove(inTheWay))
	testtool.Await(t, progress.Ended(), "it is not complete")
	require.True(t, stateOf(t, inst).Complete)
}

// TestCompleteDiskDoesNotWaitForItsImage: a part of an image that cannot be read, and has no data
// of the disk, does not keep the disk from being complete.
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
	testtool.Eventually(t, func() bool { return logs.Len() == 1 },
		"it has failed: %v", func() any { return logs.All() })
	copied()
	testtool.Await(t, done, "the work goes on")
	require.False(t, image.Identified(b.state.Chain))
	require.Equal(t, 1, logs.FilterMessage("a later start will not recognise the image").Len())
}

// TestLargeCloneMayGoPastTheCache: a large clone uses its file's way past the page cache until it
// is complete.
func TestLargeCloneMayGoPastTheCache(t *testing.T) {
	probe, err := rawfile.Open(filetest.Sparse(t, 1<<20).Name(), rawfile.Options{Private: true})
	require.NoError(t, err)
	past := probe.OpenPastCache()
	require.NoError(t, probe.Close())
	if past == nil {
		t.Skip("skipped: the temporary directory is neither on ext4 nor on XFS")
	}
	require.NoError(t, past.Close())
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Block('a', 64<<20), 0)
	opt := Options{WorkDir: t.TempDir(), Workers: NewWorkers(), Progress: new(image.Progress)}
	var held []*slots.Slot
	for range opt.Workers.copying.Count() {
		held = append(held, testtool.Must(opt.Workers.copying.Acquire(t.Context()))(t))
	}
	inst, _ := start(t, path, opt)
	ways := func() int {
		open := openFiles(t, inst.path) // including the files of the map
		other := func(name string) bool { return name != inst.path }
		return len(slices.DeleteFunc(open, other))
	}
	testtool.Eventually(t, func() bool { return ways() == 2 },
		"the file is open in two ways: %d", func() any { return ways() })
	for _, slot := range held {
		slot.Release()
	}
	testtool.Eventually(t, opt.Progress.Finished, "the copy is complete")
	require.Equal(t, 1, ways())
}

// TestCompleteDiskHoldsTwoFiles: a complete disk has only its own file and its lock open. A process
// may open only so many.
func TestCompleteDiskHoldsTwoFiles(t *testing.T) {
	for name, persistent := range map[string]bool{"ephemeral": false, "persistent": true} {
		t.Run(name, func(t *testing.T) {
			dir, work := t.TempDir(), t.TempDir()
			img, err := image.Open(filetest.Put(t, dir, "a.raw", filetest.Block('a', 64<<10), 0),
				image.Options{})
			require.NoError(t, err)
			opt := Options{WorkDir: work, Progress: new(image.Progress)}
			if persistent {
				opt.PersistentDir = work
			}
			inst := testtool.Must(Open(t.Context(), img, opt))(t)
			written := make(chan error, 1)
			go func() { // all the while
				var err error
				for i := int64(0); err == nil && i < 64 || !opt.Progress.Finished(); i++ {
					_, writeErr := inst.WriteAt(t.Context(), filetest.Block('b', 512), i%64*1024)
					err = errors.Join(err, writeErr, inst.Flush())
				}
				written <- err
			}()
			require.NoError(t, <-written)
			testtool.Eventually(t, func() bool { return len(openFiles(t, dir)) == 0 },
				"its image is closed: %v", func() any { return openFiles(t, dir) })
			require.Len(t, openFiles(t, work), 2, "%v", openFiles(t, work))
			filetest.Write(t, inst, filetest.Block('c', 512), 0)
			require.NoError(t, inst.Flush())
			require.NoError(t, inst.Close())
			require.Empty(t, openFiles(t, work))
		})
	}
}

// openFiles returns the open files of this process below a directory.
func openFiles(t *testing.T, dir string) (names []string) {
	for _, n := range filetest.Names(t, "/proc/self/fd") {
		// The descriptor that listed the directory is closed by now.
		if name, err := os.Readlink(filepath.Join("/proc/self/fd", n)); err == nil &&
			strings.HasPrefix(name, dir) {
			names = append(names, name)
		}
	}
	return names
}

// TestACompleteDiskNeedsNoImage opens a complete disk again without its image, by its name. A disk
// of another image, or an incomplete one, does not count.
func TestACompleteDiskNeedsNoImage(t *testing.T) {
	content := filetest.Sample(3<<20, 1)
	const digest, name = "sha256:0123", "registry.example.com/vm/a:1"
	for what, opt := range map[string]Options{
		"ephemeral":  {WorkDir: t.TempDir(), Name: name},
		"persistent": {PersistentDir: t.TempDir(), Name: name},
	} {
		t.Run(what, func(t *testing.T) {
			require.False(t, IsComplete(opt, []string{digest}), "there is no disk yet")
			img := testtool.Must(image.OpenSource(t.Context(), "a.raw",
				func(context.Context, string) (image.Source, error) {
					return sourcetest.New(content, sourcetest.Options{Digest: digest}), nil
				}, image.Options{}))(t)
			incomplete := opt
			incomplete.Mode = CopyOnWrite
			inst := testtool.Must(Open(t.Context(), img, incomplete))(t)
			require.NoError(t, inst.Close())
			require.False(t, IsComplete(opt, []string{digest}), "the disk is not complete")

			img = testtool.Must(image.OpenSource(t.Context(), "a.raw",
				func(context.Context, string) (image.Source, error) {
					return sourcetest.New(content, sourcetest.Options{Digest: digest}), nil
				}, image.Options{}))(t)
			inst = testtool.Must(Open(t.Context(), img, opt))(t)
			filetest.Write(t, inst, filetest.Block('w', 512), 512)
			inst.copies.done.Wait()
			require.NoError(t, inst.Close())

			require.True(t, IsComplete(opt, []string{digest}))
			require.False(t, IsComplete(opt, []string{"sha256:4567"}), "the disk has another image")
			require.False(t, IsComplete(opt, []string{digest, digest}),
				"the image had no backing file")
			require.False(t, IsComplete(opt, nil))
			if opt.PersistentDir == "" {
				other := opt
				other.Name = "registry.example.com/vm/b:1"
				require.False(t, IsComplete(other, []string{digest}))
				Sweep(t.Context(), opt.WorkDir, t.TempDir(), []string{name}, opt.Owner,
					LeftoversRemove, zap.NewNop())
			}
			again := testtool.Must(Open(t.Context(), nil, opt))(t)
			require.True(t, again.kept)
			require.Equal(t, inst.Identity, again.Identity)
			copy(content[512:], filetest.Block('w', 512))
			got := filetest.ReadAll(t, again, again.Size())
			require.Equal(t, -1, filetest.FirstDifference(content, got))
			require.NoError(t, again.Close())
			if opt.PersistentDir == "" {
				Sweep(t.Context(), opt.WorkDir, t.TempDir(), nil, opt.Owner, LeftoversRemove,
					zap.NewNop())
				_, err := os.Stat(filepath.Join(opt.WorkDir, escapeName(name)))
				require.ErrorIs(t, err, os.ErrNotExist)
			}
		})
	}
}
