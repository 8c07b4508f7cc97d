package instance

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// TestRestartWithADamagedMap: an incomplete disk is worthless without its map. An ephemeral one is
// made again. A persistent one is left alone, because somebody may have a backup. The exception is
// the live map, which only counts until the machine restarts.
func TestRestartWithADamagedMap(t *testing.T) {
	content := filetest.Sample(3<<20, 1)
	damage := map[string]func(t *testing.T, path string){
		"missing": func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) },
		"too short": func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path, mapHeaderSize-1))
		},
		"flipped": func(t *testing.T, path string) {
			f := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
			defer f.Close()
			var id [1]byte
			require.NoError(t, testtool.Err(f.ReadAt(id[:], 26)))
			require.NoError(t, testtool.Err(f.WriteAt([]byte{^id[0]}, 26)))
		},
	}
	for name, damage := range damage {
		t.Run(name, func(t *testing.T) {
			path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
			use := func(opt Options) *Instance {
				inst, _ := start(t, path, opt)
				inst.copies.done.Wait()
				filetest.Write(t, inst, filetest.Block('w', 512), 512)
				require.NoError(t, inst.Flush())
				require.NoError(t, inst.Store().Save("kept", []byte("x")))
				require.NoError(t, inst.Close())
				return inst
			}
			opt := Options{WorkDir: t.TempDir(), Mode: CopyOnWrite}
			first := use(opt)
			damage(t, first.dir.liveMap())
			again, logs := start(t, path, opt)
			require.Contains(t, dropReason(logs), "its map file")
			require.False(t, again.kept)
			require.NotEqual(t, first.Identity, again.Identity, "it has other content")
			require.NotEqual(t, filepath.Dir(first.Store().Where("kept")),
				filepath.Dir(again.Store().Where("kept")))
			require.NoDirExists(t, filepath.Dir(first.Store().Where("kept")))
			require.Equal(t, -1,
				filetest.FirstDifference(content, filetest.ReadAll(t, again, again.Size())))
			filetest.Write(t, again, filetest.Block('n', 512), 1024)
			again.copies.done.Wait()
			require.NoError(t, again.Close())
			third, _ := start(t, path, opt)
			require.True(t, third.kept)
			require.Equal(t, again.Identity, third.Identity)
			require.Equal(t, filetest.Block('n', 512), filetest.ReadAll(t, third, 1536)[1024:])

			opt = Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite}
			first = use(opt)
			damage(t, first.dir.liveMap())
			again, _ = start(t, path, opt)
			require.True(t, again.kept)
			require.Equal(t, filetest.Block('w', 512), filetest.ReadAll(t, again, 1024)[512:])
			again.copies.done.Wait()
			require.NoError(t, again.Close())
			before := filetest.Content(t, first.dir.disk())
			damage(t, first.dir.durableMap())
			for range 2 {
				_, err := Open(t.Context(), openGood(t, path), opt)
				var refused *PersistentError
				require.ErrorAs(t, err, &refused)
				require.ErrorContains(t, err, "is not complete, and its map file")
				require.ErrorContains(t, err, strconv.Quote(first.dir.durableMap()))
				require.ErrorContains(t, err, "backup")
			}
			after := filetest.Content(t, first.dir.disk())
			require.Equal(t, -1, filetest.FirstDifference(before, after))
			require.FileExists(t, first.dir.state())
		})
	}
}

// TestRestartWithAnotherSize: a disk, or its file, may be enlarged. It is never made smaller.
func TestRestartWithAnotherSize(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
	for _, mode := range []CopyMode{CopyOnWrite, CopyClone} {
		opt := Options{PersistentDir: t.TempDir(), Mode: mode}
		next := func(size, want int64, grown bool) {
			t.Helper()
			opt.Size = size
			inst, _ := start(t, path, opt)
			require.Equal(t, want, inst.Size())
			require.Equal(t, grown, inst.Grown)
			p := filetest.Read(t, inst, want-512, 512)
			filetest.Write(t, inst, p, want-512)
			require.NoError(t, inst.Close())
		}
		next(0, 3<<20, false)
		next(5<<20, 5<<20, true)
		next(0, 5<<20, false)
		require.NoError(t, os.Truncate(filepath.Join(opt.PersistentDir, PersistentName), 6<<20-100))
		next(0, 6<<20, true)
		for _, size := range []int64{4 << 20, 6<<20 - 512} {
			opt.Size = size
			_, err := Open(t.Context(), openGood(t, path), opt)
			var refused *SizeError
			require.ErrorAs(t, err, &refused)
			require.ErrorContains(t, err, "never made smaller")
		}
		next(0, 6<<20, false)
	}
}

// TestReadsAreKeptInOneMode: one mode keeps what is read. The other does not, because people choose
// it to save space.
func TestReadsAreKeptInOneMode(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Block('a', 1<<20), 0)
	for mode, kept := range map[CopyMode]int64{CopyOnRead: 64 << 10, CopyOnWrite: 0} {
		inst, _ := start(t, path, Options{WorkDir: t.TempDir(), Mode: mode})
		require.NoError(t, testtool.Err(inst.ReadAt(t.Context(), make([]byte, 64<<10), 128<<10)))
		copied, _ := inst.tree.Stack().Top().Copied()
		require.Equal(t, kept, copied, mode)
	}
}

// TestLargeImageInASmallDirectory: only a mode that copies everything needs space for everything.
func TestLargeImageInASmallDirectory(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
	small := filetest.TinyFS(t, "1m")
	_, err := Open(t.Context(), openGood(t, path), Options{WorkDir: small, Mode: CopyClone})
	require.ErrorAs(t, err, new(*image.SpaceError))
	require.Len(t, filetest.Names(t, small), 1, "only the directory with the lock")
	for _, mode := range []CopyMode{CopyOnRead, CopyOnWrite} {
		inst, _ := start(t, path, Options{WorkDir: filetest.TinyFS(t, "1m"), Mode: mode})
		require.EqualValues(t, 3<<20, inst.Size())
	}
}

// TestDiskThatIsOnTheVolumeAlready: a disk that somebody has put on the volume is served as it is.
// A disk that has lost its state is not such a disk.
func TestDiskThatIsOnTheVolumeAlready(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
	content := filetest.Sample(2<<20, 2)
	opt := Options{PersistentDir: t.TempDir()}
	filetest.Put(t, opt.PersistentDir, PersistentName, content, 0)
	inst, _ := start(t, path, opt)
	require.True(t, inst.kept)
	require.Equal(t, -1, filetest.FirstDifference(content, filetest.ReadAll(t, inst, inst.Size())))
	require.NoError(t, inst.Close())
	again, _ := start(t, path, opt)
	require.Equal(t, inst.Identity, again.Identity, "from now on it is known")
	require.NoError(t, again.Close())

	for _, left := range []func(*diskDir) string{(*diskDir).liveMap, (*diskDir).durableMap} {
		lost := Options{PersistentDir: t.TempDir()}
		filetest.Put(t, lost.PersistentDir, PersistentName, content, 0)
		name := left(&diskDir{path: lost.PersistentDir, diskFile: PersistentName})
		filetest.Put(t, lost.PersistentDir, filepath.Base(name), []byte("a map"), 0)
		_, err := Open(t.Context(), openGood(t, path), lost)
		require.ErrorContains(t, err, "has lost its state file, and is not complete without it")
		require.FileExists(t, name)
	}
	for _, size := range []int64{0, 100, 1<<20 + 1} {
		odd := Options{PersistentDir: t.TempDir()}
		filetest.Put(t, odd.PersistentDir, PersistentName, nil, size)
		_, err := Open(t.Context(), openGood(t, path), odd)
		require.ErrorContains(t, err, "which is not a positive multiple of 512")
	}
}

// TestCompleteDiskThatStopsBeingDurable: the state of a complete disk says when it is no longer
// flushed. Otherwise a restart of the machine would keep a disk that has lost what was only in the
// page cache.
func TestCompleteDiskThatStopsBeingDurable(t *testing.T) {
	content := filetest.Sample(1<<20, 1)
	path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
	opt := Options{WorkDir: t.TempDir(), Durable: true, Owner: "one"}
	first, _ := start(t, path, opt)
	settle(t, first)
	require.NoError(t, first.Close())
	for _, durable := range []bool{true, false} {
		opt.Durable, opt.Owner = durable, "another"
		inst, _ := start(t, path, opt)
		require.True(t, inst.kept)
		filetest.Write(t, inst, filetest.Block('w', 512), 0)
		require.NoError(t, inst.Flush())
		require.NoError(t, inst.Close())
		s := stateOf(t, inst)
		require.Equal(t, durable, s.Durable)
		require.Equal(t, "another", s.Owner, "who may sweep it from now on")
		require.True(t, s.survivesBoot(bootID()))
		require.Equal(t, durable, s.survivesBoot("another"))
	}
}

// olderVersion is what a version of this program without layers says of a disk: it decodes the
// state, and looks at no file that it does not know.
func olderVersion(t *testing.T, inst *Instance) error {
	t.Helper()
	return durable.LoadRecord(inst.dir.state(), new(state), 2)
}

// TestOlderVersionsRefuseLayers: while a disk has layers, versions of this program that know none
// refuse it, whatever else is recorded of the disk meanwhile. Without them they can go back to it.
func TestOlderVersionsRefuseLayers(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	for kind, opt := range map[string]Options{"ephemeral": {}, "persistent": {Mode: CopyClone}} {
		t.Run(kind, func(t *testing.T) {
			later := make(chan struct{})
			opt.CopyAfter = later // so that the disk becomes complete while it has layers
			if opt.WorkDir = t.TempDir(); kind == "persistent" {
				opt.PersistentDir = t.TempDir()
			}
			inst, _ := start(t, path, opt)
			require.NoError(t, olderVersion(t, inst))
			require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
			require.ErrorContains(t, olderVersion(t, inst), "version 3, and this program knows 2")
			close(later)
			settle(t, inst)
			require.True(t, stateOf(t, inst).Complete)
			require.Error(t, olderVersion(t, inst))
			require.NoError(t, inst.Close())
			opt.LUN = 7 // something to be recorded at the start
			inst, _ = start(t, path, opt)
			require.True(t, inst.kept)
			require.Error(t, olderVersion(t, inst))
			without(t, inst)
			testtool.Eventually(t, func() bool { return olderVersion(t, inst) == nil })
			require.NoFileExists(t, inst.dir.layers())
			require.ErrorContains(t, TakeSnapshot(t.Context(), "-", inst), "name")
			require.NoError(t, olderVersion(t, inst))
			require.NoError(t, inst.Close())
		})
	}
}

// TestUnfinishedLayers: a process was killed before the first layer was made, or after the last one
// was removed. The next start ends that, and one with layers is marked as such.
func TestUnfinishedLayers(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	opt := Options{PersistentDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	settle(t, inst)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	without(t, inst)
	testtool.Eventually(t, func() bool { return olderVersion(t, inst) == nil })
	require.NoError(t, inst.Close())
	for _, marked := range []bool{false, true} {
		dir := testtool.Must(openPersistentDir(opt.PersistentDir))(t)
		files := &shelf{dir: dir, durable: true}
		require.NoError(t, files.Save(overlay.NewRecord(inst.content, true)))
		require.NoError(t, files.Mark(marked))
		require.NoError(t, dir.close())
		inst, _ = start(t, path, opt)
		require.True(t, inst.kept)
		require.Empty(t, layerFiles(t, inst))
		require.NoError(t, olderVersion(t, inst))
		require.NoError(t, inst.Close())
	}
	inst, _ = start(t, path, opt)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	require.NoError(t, inst.Close())
	dir := testtool.Must(openPersistentDir(opt.PersistentDir))(t)
	require.NoError(t, dir.mark(false, true))
	require.NoError(t, dir.close())
	require.NoError(t, olderVersion(t, inst))
	inst, _ = start(t, path, opt)
	require.Len(t, inst.Snapshots(), 1)
	require.Error(t, olderVersion(t, inst))
}

// TestOlderVersionMadeItAgain: a version without layers makes an ephemeral disk again, and leaves
// the layers of the one before. They are no part of the new disk.
func TestOlderVersionMadeItAgain(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	opt := Options{WorkDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	settle(t, inst)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	filetest.Write(t, inst, filetest.Block('a', 4096), 0)
	layers := layerFiles(t, inst)
	require.NoError(t, inst.Close())
	aside := t.TempDir()
	for _, name := range layers {
		require.NoError(t, os.Rename(filepath.Join(inst.dir.path, name),
			filepath.Join(aside, name)))
	}
	require.NoError(t, inst.dir.clear())
	inst, _ = start(t, path, opt)
	settle(t, inst)
	filetest.Write(t, inst, filetest.Block('b', 4096), 0)
	require.NoError(t, inst.Close())
	for _, name := range layers {
		require.NoError(t, os.Rename(filepath.Join(aside, name),
			filepath.Join(inst.dir.path, name)))
	}
	inst, _ = start(t, path, opt)
	require.True(t, inst.kept)
	require.Empty(t, inst.Snapshots())
	require.Empty(t, layerFiles(t, inst))
	require.Equal(t, filetest.Block('b', 4096), filetest.ReadAll(t, inst, 4096))
}
