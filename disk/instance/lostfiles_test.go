package instance

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
)

// contentsBelow returns the content of all files below a directory, by name. What is only a lock or
// room for the next state does not count.
func contentsBelow(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasSuffix(path, durable.SpareSuffix) ||
			strings.HasSuffix(path, "lock") {
			return err
		}
		text, err := os.ReadFile(path)
		all[filepath.Base(path)] = string(text)
		return err
	}))
	return all
}

// TestLostFiles: if some files of a disk with a snapshot are there and others are not, the disk is
// not served, and what is there stays.
func TestLostFiles(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	for _, opt := range []Options{
		{PersistentDir: "p", Mode: CopyClone},
		{PersistentDir: "p", Mode: CopyOnWrite},
		{WorkDir: "w", Mode: CopyOnWrite, Leftovers: LeftoversKeep},
	} {
		opt := within(opt, t.TempDir())
		inst, _ := start(t, path, opt)
		if opt.Mode == CopyClone {
			settle(t, inst)
		}
		require.NoError(t, TakeSnapshot(t.Context(), "s", inst))
		filetest.Write(t, inst, filetest.Block('n', 4096), 0)
		require.NoError(t, inst.Store().Save("reservations", []byte("x")))
		require.NoError(t, inst.Close())
		dir := inst.dir
		groups := [][]string{{dir.diskFile}, {dir.stateFile}, {filepath.Base(dir.layers())},
			nil, {dir.diskFile + mapSuffixes[0], dir.diskFile + mapSuffixes[1]}}
		for _, name := range filetest.Names(t, dir.path) {
			if strings.HasPrefix(name, dir.diskFile+layerInfix) {
				groups[3] = append(groups[3], name)
			}
		}
		require.NotEmpty(t, groups[3])
		// a map is a part, but the disk finds that it is missing
		for lost := 1; lost < 1<<4; lost++ {
			some := within(opt, t.TempDir())
			copied := strings.Replace(dir.path, rootOf(opt), rootOf(some), 1)
			require.NoError(t, os.MkdirAll(filepath.Dir(copied), 0o755))
			require.NoError(t, os.CopyFS(copied, os.DirFS(dir.path)))
			var gone []string
			for i, group := range groups {
				for _, name := range group {
					if lost&(1<<i) != 0 {
						gone = append(gone, name)
						require.NoError(t, os.RemoveAll(filepath.Join(copied, name)))
					}
				}
			}
			before := contentsBelow(t, copied)
			again, err := Open(t.Context(), openGood(t, path), some)
			if err == nil {
				// An ephemeral disk may be made again, beside what there was.
				require.Empty(t, some.PersistentDir, "without %v", gone)
				require.NoError(t, again.Close())
				kept, err := filepath.Glob(filepath.Join(copied, asidePrefix+"*"))
				require.NoError(t, err)
				require.Len(t, kept, 1, "without %v", gone)
				copied = kept[0]
			}
			after := contentsBelow(t, copied)
			maps.DeleteFunc(after, func(name, _ string) bool {
				_, known := before[name]
				return !known
			})
			require.Equal(t, slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(after)),
				"without %v: %v", gone, err)
			require.Equal(t, before, after, "without %v", gone)
		}
	}
}

// within puts the directory of a disk below another one.
func within(opt Options, root string) Options {
	if opt.PersistentDir != "" {
		opt.PersistentDir = filepath.Join(root, "p")
	} else {
		opt.WorkDir = filepath.Join(root, "w")
	}
	return opt
}

func rootOf(opt Options) string { return opt.PersistentDir + opt.WorkDir }

// TestVolumeWithWhatIsLeft: a disk whose file is missing still counts when a place is chosen.
func TestVolumeWithWhatIsLeft(t *testing.T) {
	for _, name := range []string{PersistentName, PersistentName + ".state",
		PersistentName + ".layers", PersistentName + layerInfix + "0"} {
		volume := t.TempDir()
		require.False(t, HasPersistent(volume))
		filetest.Put(t, volume, name, []byte("x"), 0)
		require.True(t, HasPersistent(volume), name)
		_, err := PersistentDirs(volume, []string{"a", "b"})
		require.ErrorContains(t, err, "is the disk of a volume for one image", name)
	}
}
