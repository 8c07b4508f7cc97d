package instance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

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
		dir, err := openPersistentDir(opt.PersistentDir)
		require.NoError(t, err)
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
	dir, err := openPersistentDir(opt.PersistentDir)
	require.NoError(t, err)
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
