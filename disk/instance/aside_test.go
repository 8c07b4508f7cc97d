package instance

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// asidesOf returns the directories of the disks that were set aside.
func asidesOf(t *testing.T, work, image string) (paths []string) {
	t.Helper()
	for _, a := range testtool.Must(workDirOf(work, escapeName(image)).asides())(t) {
		paths = append(paths, a.path)
	}
	return paths
}

// TestADiskThatDoesNotFitIsSetAside checks that what a guest wrote stays if the image differs by a
// byte, and is found again when the image is back, in every mode, complete or not.
func TestADiskThatDoesNotFitIsSetAside(t *testing.T) {
	old := filetest.Sample(3<<20, 1)
	changed := append([]byte(nil), old...)
	changed[1<<20] ^= 1
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		t.Run(string(mode), func(t *testing.T) {
			images, work := t.TempDir(), t.TempDir()
			opt := Options{WorkDir: work, Owner: "us", Mode: mode, Leftovers: LeftoversKeep}
			serve := func(content []byte, mark byte) (*Instance, []byte) {
				inst, logs := start(t, filetest.Put(t, images, "a.raw", content, 0), opt)
				if inst.copies != nil {
					inst.copies.done.Wait()
				}
				if opt.Leftovers == LeftoversKeep {
					require.Zero(t, logs.FilterMessageSnippet("removed").Len())
				}
				if !inst.kept {
					filetest.Write(t, inst, filetest.Block(mark, 512), 4096)
					require.NoError(t, inst.Store().Save("kept", []byte{mark}))
				}
				require.Equal(t, []byte{mark}, testtool.Must(inst.Store().Load("kept"))(t))
				got := filetest.ReadAll(t, inst, inst.Size())
				require.NoError(t, inst.Close())
				return inst, got
			}
			first, was := serve(old, 'o')
			second, _ := serve(changed, 'n')
			require.False(t, second.kept)
			require.NotEqual(t, first.Identity, second.Identity)
			require.Len(t, asidesOf(t, work, "a.raw"), 1)
			for range 2 { // back and forth
				again, now := serve(old, 'o')
				require.True(t, again.kept)
				require.Equal(t, first.Identity, again.Identity)
				require.Equal(t, -1, filetest.FirstDifference(was, now))
				again, _ = serve(changed, 'n')
				require.True(t, again.kept)
				require.Equal(t, second.Identity, again.Identity)
				require.Len(t, asidesOf(t, work, "a.raw"), 1)
			}
			// A setting removes it.
			opt.Leftovers = LeftoversRemove
			serve(changed, 'n')
			require.Empty(t, asidesOf(t, work, "a.raw"))
		})
	}
}

// TestNothingThatAGuestWroteIsRemoved checks the other reasons why a disk is made again.
func TestNothingThatAGuestWroteIsRemoved(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, inst *Instance, opt *Options){
		"damaged state": func(t *testing.T, inst *Instance, _ *Options) {
			require.NoError(t, os.Truncate(inst.dir.state(), 20))
		},
		"no state": func(t *testing.T, inst *Instance, _ *Options) {
			require.NoError(t, os.Remove(inst.dir.state()))
		},
		"no map": func(t *testing.T, inst *Instance, _ *Options) {
			require.NoError(t, os.Remove(inst.dir.liveMap()))
		},
		"another boot": func(t *testing.T, inst *Instance, _ *Options) {
			rewrite(t, inst.dir.path, func(s *state) { s.Boot = "earlier" })
		},
		"another image": func(t *testing.T, inst *Instance, _ *Options) {
			rewrite(t, inst.dir.path, func(s *state) { s.Image = "other.raw" })
		},
		"served in place": func(t *testing.T, inst *Instance, opt *Options) { opt.Mode = CopyNone },
	} {
		t.Run(name, func(t *testing.T) {
			work := t.TempDir()
			path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
			opt := Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite, Leftovers: LeftoversKeep}
			inst, _ := start(t, path, opt)
			inst.copies.done.Wait()
			filetest.Write(t, inst, filetest.Block('w', 4096), 4096)
			require.NoError(t, inst.Close())
			spoil(t, inst, &opt)
			again, logs := start(t, path, opt)
			require.Equal(t, 1, logs.FilterMessageSnippet("it is set aside").Len())
			require.NoError(t, again.Close())
			aside := asidesOf(t, work, "a.raw")
			require.Len(t, aside, 1)
			written := filetest.Content(t, filepath.Join(aside[0], diskName))
			require.Equal(t, filetest.Block('w', 4096), written[4096:8192])
			if name == "served in place" {
				opt.Mode = CopyOnWrite
				again, _ = start(t, path, opt)
				require.Equal(t, inst.Identity, again.Identity)
				require.Equal(t, filetest.Block('w', 4096), filetest.ReadAll(t, again, 8192)[4096:])
			}
		})
	}
}

// TestADiskThatIsMissingIsNotMadeAgain: a disk that was there once is refused until it is back. So
// is one without a hash of its image yet, as with a far image, or without any image.
func TestADiskThatIsMissingIsNotMadeAgain(t *testing.T) {
	content := filetest.Sample(1<<20, 1)
	path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
	images := map[string]func(t *testing.T) *image.Image{
		"near": func(t *testing.T) *image.Image { return openGood(t, path) },
		"far": func(t *testing.T) *image.Image {
			img, _ := openFar(t, content, "sha256:1")
			return img
		},
	}
	for where, open := range images {
		for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
			for name, opt := range map[string]Options{
				"named":      {WorkDir: t.TempDir(), Leftovers: LeftoversKeep},
				"persistent": {PersistentDir: t.TempDir()},
			} {
				t.Run(where+"/"+string(mode)+"/"+name, func(t *testing.T) {
					opt.Mode = mode
					inst, err := Open(t.Context(), open(t), opt)
					require.NoError(t, err)
					if where == "near" {
						inst.copies.done.Wait()
					}
					filetest.Write(t, inst, filetest.Block('w', 512), 0)
					require.NoError(t, inst.Close())
					require.NoError(t, os.Rename(inst.path, inst.path+"-away"))
					for range 2 {
						_, err = Open(t.Context(), open(t), opt)
						require.ErrorContains(t, err, "is missing, and was there at an earlier")
						require.NoFileExists(t, inst.path)
					}
					require.NoError(t, os.Rename(inst.path+"-away", inst.path))
					again := testtool.Must(Open(t.Context(), open(t), opt))(t)
					require.Equal(t, inst.Identity, again.Identity)
					require.Equal(t, filetest.Block('w', 512), filetest.ReadAll(t, again, 512))
					require.NoError(t, again.Close())
				})
			}
		}
	}
	t.Run("brought along", func(t *testing.T) {
		opt := Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite}
		at := filetest.Put(t, opt.PersistentDir, PersistentName, content, 0)
		path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
		inst, _ := start(t, path, opt)
		require.NoError(t, inst.Close())
		require.NoError(t, os.Rename(at, at+"-away"))
		_, err := Open(t.Context(), openGood(t, path), opt)
		require.ErrorContains(t, err, "is missing, and was there at an earlier start")
		require.NoFileExists(t, at)
	})
	t.Run("of an earlier version", func(t *testing.T) {
		opt := Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite}
		inst, _ := startFar(t, content, "sha256:1", opt)
		require.NoError(t, inst.Close())
		s := stateOf(t, inst)
		s.Made = false
		require.NoError(t, s.save(inst.dir.state(), true))
		inst, _ = startFar(t, content, "sha256:1", opt)
		require.NoError(t, inst.Close())
		require.NoError(t, os.Remove(inst.path))
		img, _ := openFar(t, content, "sha256:1")
		_, err := Open(t.Context(), img, opt)
		require.ErrorContains(t, err, "is missing, and was there at an earlier start")
	})
}

// TestKilledBeforeTheFileIsMade: a state alone is no disk yet.
func TestKilledBeforeTheFileIsMade(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	killed := func(inst *Instance) {
		require.NoError(t, inst.Close())
		s := stateOf(t, inst)
		if len(s.Chain) > 0 {
			s.Chain[0].Hash = ""
		}
		s.Made = false
		require.NoError(t, s.save(inst.dir.state(), true))
		require.NoError(t, os.Remove(inst.path))
	}
	opt := Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite}
	inst, _ := start(t, path, opt)
	killed(inst)
	inst, _ = start(t, path, opt)
	require.False(t, inst.kept)
	require.NoError(t, inst.Close())

	opt = Options{PersistentDir: t.TempDir(), Empty: true, Size: 1 << 20}
	inst = testtool.Must(Open(t.Context(), nil, opt))(t)
	killed(inst)
	_, err := Open(t.Context(), nil, Options{PersistentDir: opt.PersistentDir})
	require.ErrorContains(t, err, "does not exist yet")
	inst = testtool.Must(Open(t.Context(), nil, opt))(t)
	require.NoError(t, inst.Close())

	// So is one of a disk that nobody flushes, and that a power cut has left empty.
	opt = Options{WorkDir: t.TempDir(), Mode: CopyOnWrite, Leftovers: LeftoversKeep}
	inst, _ = start(t, path, opt)
	killed(inst)
	require.NoError(t, os.Truncate(inst.dir.state(), 0))
	inst, _ = start(t, path, opt)
	require.False(t, inst.kept)
	require.NoError(t, inst.Close())
}

// TestSettingAsideIsKilled kills a move after each file, there and back: the next start finds the
// disk all the same.
func TestSettingAsideIsKilled(t *testing.T) {
	images := t.TempDir()
	old, changed := filetest.Sample(1<<20, 1), filetest.Sample(1<<20, 2)
	for killed := range 6 {
		for _, back := range []bool{false, true} {
			opt := Options{WorkDir: t.TempDir(), Mode: CopyOnWrite, Leftovers: LeftoversKeep}
			use := func(content []byte) *Instance {
				inst, _ := start(t, filetest.Put(t, images, "a.raw", content, 0), opt)
				inst.copies.done.Wait()
				return inst
			}
			first := use(old)
			filetest.Write(t, first, filetest.Block('w', 512), 512)
			require.NoError(t, first.Store().Save("kept", []byte("x")))
			require.NoError(t, first.Close())
			d := workDirOf(opt.WorkDir, "a.raw")
			path := testtool.Must(d.setAside())(t)
			aside := workDirOf(d.path, filepath.Base(path))
			// Undo what comes after the kill.
			names := testtool.Must(aside.files())(t)
			names = append([]string{stateName}, names...)
			if killed > len(names) {
				continue
			}
			if back { // the disk went first, and the state last
				for _, name := range names[len(names)-killed:] {
					require.NoError(t, os.Rename(filepath.Join(path, name),
						filepath.Join(d.path, name)))
				}
			} else {
				for _, name := range names[killed:] {
					require.NoError(t, os.Rename(filepath.Join(path, name),
						filepath.Join(d.path, name)))
				}
			}
			// Whichever image comes next, the old one finds its disk.
			if killed%2 == 0 {
				require.NoError(t, use(changed).Close())
			}
			again := use(old)
			require.True(t, again.kept, "%d %t", killed, back)
			require.Equal(t, first.Identity, again.Identity)
			require.Equal(t, filetest.Block('w', 512), filetest.ReadAll(t, again, 1024)[512:])
			require.Equal(t, "x", string(testtool.Must(again.Store().Load("kept"))(t)))
			require.NoError(t, again.Close())
		}
	}
}

// TestSweepKeepsInANamedDirectory: the disk of an image that is gone stays where a person has named
// the directory. Removing it takes the setting, and removes what was set aside, too.
func TestSweepKeepsInANamedDirectory(t *testing.T) {
	images, work := t.TempDir(), t.TempDir()
	opt := Options{WorkDir: work, Owner: "us", Mode: CopyOnWrite, Leftovers: LeftoversKeep}
	for i := range 2 {
		path := filetest.Put(t, images, "a.raw", filetest.Sample(1<<20, uint64(i)), 0)
		inst, _ := start(t, path, opt)
		inst.copies.done.Wait()
		filetest.Write(t, inst, filetest.Block('w', 512), 512)
		require.NoError(t, inst.Close())
	}
	require.NoError(t, os.Remove(filepath.Join(images, "a.raw")))
	core, logs := observer.New(zap.DebugLevel)
	sweep := func(l Leftovers) int64 {
		return Sweep(t.Context(), work, images, nil, "us", l, zap.New(core))
	}
	for range 2 {
		require.Positive(t, sweep(LeftoversKeep))
		require.FileExists(t, filepath.Join(work, "a.raw", diskName))
		require.Len(t, asidesOf(t, work, "a.raw"), 1)
	}
	told := logs.FilterMessageSnippet("is kept").All()
	require.Len(t, told, 2)
	require.Equal(t, "a.raw", told[0].ContextMap()["image"])
	require.True(t, strings.Contains(told[0].ContextMap()["to_remove_it"].(string), "--leftovers"))
	require.Zero(t, sweep(LeftoversRemove))
	require.NoDirExists(t, filepath.Join(work, "a.raw"))
}

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
			nil, {dir.diskFile + image.MapSuffixes[0], dir.diskFile + image.MapSuffixes[1]}}
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
				kept := testtool.Must(filepath.Glob(filepath.Join(copied, asidePrefix+"*")))(t)
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

// TestVolumeWithWhatIsLeft: a disk whose file is missing still counts when a place is chosen. An
// empty place has none, also behind a link.
func TestVolumeWithWhatIsLeft(t *testing.T) {
	for _, name := range []string{PersistentName, PersistentName + ".state",
		PersistentName + ".layers", PersistentName + layerInfix + "0"} {
		volume := t.TempDir()
		require.False(t, HasPersistent(volume))
		link := filepath.Join(t.TempDir(), "link")
		require.NoError(t, os.Symlink(volume, link))
		require.False(t, HasPersistent(link))
		require.NoError(t, os.Mkdir(filepath.Join(volume, "a"), 0o700))
		homes := Homes{Persistent: true}
		require.False(t, testtool.Must(homes.holds(filepath.Join(link, "a"), "a"))(t))
		filetest.Put(t, volume, name, []byte("x"), 0)
		require.True(t, HasPersistent(volume), name)
		_, err := PersistentDirs(volume, []string{"a", "b"})
		require.ErrorContains(t, err, "is the disk of a volume for one image", name)
	}
}
