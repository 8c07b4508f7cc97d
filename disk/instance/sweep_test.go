package instance

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// sweep runs Sweep, and returns the remaining directories and the log.
func sweep(t *testing.T, work, images, owner string) (left []string, logs *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	Sweep(t.Context(), work, images, nil, owner, LeftoversRemove, zap.New(core))
	return filetest.Names(t, work), logs
}

func TestSweepRemovesTheDiskOfAnImageThatIsGone(t *testing.T) {
	images, work := t.TempDir(), t.TempDir()
	for _, name := range []string{"gone one.raw", "kept.raw", "in place.raw"} {
		filetest.Put(t, images, name, filetest.Sample(3<<20, 1), 0)
	}
	opt := Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite}
	var used int64
	for _, name := range []string{"gone one.raw", "kept.raw"} {
		inst, _ := start(t, filepath.Join(images, name), opt)
		filetest.Write(t, inst, filetest.Block('w', 1<<20), 0)
		require.NoError(t, inst.Store().Save("mode-pages", []byte("x")))
		require.NoError(t, inst.Close())
		used = usedIn(inst.dir.path)
	}
	opt.Mode = CopyNone
	inPlace, _ := start(t, filepath.Join(images, "in place.raw"), opt)
	require.NoError(t, inPlace.Close())
	filetest.Put(t, work, "control.sock", nil, 0)
	all := []string{"control.sock", "gone%20one.raw", "in%20place.raw", "kept.raw"}
	left, logs := sweep(t, work, images, "us")
	require.Equal(t, all, left, "all images exist")
	require.Zero(t, logs.Len())

	require.NoError(t, os.Remove(filepath.Join(images, "gone one.raw")))
	require.NoError(t, os.Remove(filepath.Join(images, "in place.raw")))
	// The remains of a killed process.
	filetest.Put(t, filepath.Join(work, "gone%20one.raw"), diskName+durable.PartialSuffix,
		[]byte("x"), 0)
	left, logs = sweep(t, work, images, "us")
	require.Equal(t, []string{"control.sock", "kept.raw"}, left)
	removed := logs.FilterMessage("removed the disk of an image that is gone").All()
	require.Len(t, removed, 2)
	require.Equal(t, "gone one.raw", removed[0].ContextMap()["image"])
	require.InDelta(t, used, removed[0].ContextMap()["bytes"], 16<<10)
	require.FileExists(t, filepath.Join(images, "kept.raw"))
}

// TestSweepKeeps: Sweep does not touch files that anybody may need.
func TestSweepKeeps(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, inst *Instance, images string){
		"a disk that is served": func(t *testing.T, inst *Instance, _ string) {},
		"that of another owner": func(t *testing.T, inst *Instance, _ string) {
			require.NoError(t, inst.Close())
			rewrite(t, inst.dir.path, func(s *state) { s.Owner = "them" })
		},
		"that of nobody": func(t *testing.T, inst *Instance, _ string) {
			require.NoError(t, inst.Close())
			rewrite(t, inst.dir.path, func(s *state) { s.Owner = "" })
		},
		"one with a damaged state": func(t *testing.T, inst *Instance, _ string) {
			require.NoError(t, inst.Close())
			require.NoError(t, os.Truncate(inst.dir.state(), 20))
		},
		"one without a state": func(t *testing.T, inst *Instance, _ string) {
			require.NoError(t, inst.Close())
			require.NoError(t, os.Remove(inst.dir.state()))
		},
		"a copy under another name": func(t *testing.T, inst *Instance, _ string) {
			require.NoError(t, inst.Close())
			require.NoError(t, os.Rename(inst.dir.path, inst.dir.path+"-backup"))
		},
		"that of a file that is no image": func(t *testing.T, inst *Instance, images string) {
			require.NoError(t, inst.Close())
			filetest.Put(t, images, "a.raw", []byte("cannot be opened"), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			images, work := t.TempDir(), t.TempDir()
			inst, _ := start(t, filetest.Put(t, images, "a.raw", []byte("data"), 1<<20),
				Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite})
			require.NoError(t, os.Remove(filepath.Join(images, "a.raw")))
			prepare(t, inst, images)
			left, logs := sweep(t, work, images, "us")
			require.Len(t, left, 1)
			require.FileExists(t, filepath.Join(work, left[0], diskName))
			require.Zero(t, logs.FilterMessageSnippet("removed").Len())
			require.Zero(t, logs.FilterLevelExact(zap.WarnLevel).Len())
		})
	}
}

// TestSweepSaysNothingWithoutAWorkDirectory: if all disks are on volumes, there may be no work
// directory.
func TestSweepSaysNothingWithoutAWorkDirectory(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	Sweep(t.Context(), filepath.Join(t.TempDir(), "none"), t.TempDir(), nil, "us", LeftoversRemove,
		zap.New(core))
	require.Zero(t, logs.Len())
}

func TestSweepNeverTouchesAPersistentDisk(t *testing.T) {
	images, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, images, "a.raw", filetest.Sample(1<<20, 1), 0)
	ephemeral, _ := start(t, path, Options{WorkDir: work, Owner: "us"})
	require.NoError(t, ephemeral.Close())
	dirs := testtool.Must(PersistentDirs(work, []string{"a.raw", "b.raw"}))(t)
	require.Equal(t, filepath.Join(work, "a.raw"), dirs[0])
	persistent, _ := start(t, path, Options{PersistentDir: dirs[0], Owner: "us"})
	settle(t, persistent)
	require.NoError(t, persistent.Store().Save("mode-pages", []byte("x")))
	require.NoError(t, persistent.Close())
	require.NoError(t, os.Remove(path))

	left, logs := sweep(t, work, images, "us")
	require.Equal(t, []string{"a.raw"}, left)
	require.Equal(t, 1, logs.FilterMessageSnippet("removed").Len())
	require.NoFileExists(t, ephemeral.path)
	filetest.Put(t, images, "a.raw", filetest.Sample(1<<20, 1), 0)
	again, _ := start(t, path, Options{PersistentDir: dirs[0]})
	require.True(t, again.kept)
	require.Equal(t, persistent.Identity, again.Identity)
	require.Equal(t, "x", string(testtool.Must(again.Store().Load("mode-pages"))(t)))
	require.NoError(t, again.Close())

	before := testtool.Must(os.ReadDir(dirs[0]))(t)
	require.NoError(t, os.Remove(path))
	sweep(t, work, images, "us")
	require.Equal(t, before, testtool.Must(os.ReadDir(dirs[0]))(t))
}

// TestSweepGoesOn: the next process continues the removal of a killed one.
func TestSweepGoesOn(t *testing.T) {
	images, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, images, "a.raw", filetest.Sample(1<<20, 1), 0)
	inst, _ := start(t, path, Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite})
	require.NoError(t, inst.Close())
	require.NoError(t, os.Remove(inst.path))
	again, _ := start(t, path, Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite})
	require.False(t, again.kept, "the image is back")
	require.NoError(t, again.Close())
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Remove(inst.path))
	left, _ := sweep(t, work, images, "us")
	require.Empty(t, left)
}

// TestSweepBesideAStart: a process that opens a disk during a sweep either finds it in use, or has
// it for itself.
func TestSweepBesideAStart(t *testing.T) {
	images, work, none := t.TempDir(), t.TempDir(), t.TempDir()
	path := filetest.Put(t, images, "a.raw", []byte("data"), 1<<20)
	stop, swept := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(swept)
		for {
			select {
			case <-stop:
				return
			default:
				Sweep(t.Context(), work, none, nil, "us", LeftoversRemove, zap.NewNop())
			}
		}
	}()
	opened := 0
	for range 300 {
		inst, err := Open(t.Context(), openGood(t, path),
			Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite})
		if errors.As(err, new(*durable.LockedError)) {
			continue
		}
		require.NoError(t, err)
		opened++
		for _, name := range []string{inst.dir.disk(), inst.dir.state(), inst.dir.liveMap(),
			inst.dir.lock.Name()} {
			require.FileExists(t, name)
		}
		require.True(t, testtool.Must(flock.HasName(inst.dir.lock, inst.dir.lock.Name()))(t))
		require.NoError(t, inst.Close())
	}
	close(stop)
	<-swept
	require.Positive(t, opened)
}
