package instance

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// foreign makes a directory with files of another user, and a check that they are unchanged.
func foreign(t *testing.T, names ...string) (dir string, unchanged func()) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range names {
		filetest.Put(t, dir, name, filetest.Block('f', 1<<20), 0) // as large as a disk
	}
	return dir, func() {
		t.Helper()
		require.ElementsMatch(t, names, filetest.Names(t, dir))
		for _, name := range names {
			content := filetest.Content(t, filepath.Join(dir, name))
			require.True(t, bytes.Equal(filetest.Block('f', 1<<20), content), name)
		}
	}
}

// TestDirectoryThatIsALink: a link in place of a disk's directory is not followed, and the error
// says so.
func TestDirectoryThatIsALink(t *testing.T) {
	victim, unchanged := foreign(t, durable.LockName, diskName, stateName, PersistentName,
		PersistentName+".lock")
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	for _, mode := range []CopyMode{CopyClone, CopyOnWrite, CopyNone} {
		work := t.TempDir()
		require.NoError(t, os.Symlink(victim, filepath.Join(work, "a.raw")))
		_, err := Open(t.Context(), openGood(t, path), Options{WorkDir: work, Mode: mode})
		require.ErrorContains(t, err, "symbolic link")
		require.ErrorContains(t, err, filepath.Join(work, "a.raw"))
		unchanged()
	}
	volume := t.TempDir()
	require.NoError(t, os.Symlink(victim, filepath.Join(volume, "a.raw")))
	dirs := testtool.Must(PersistentDirs(volume, []string{"a.raw", "b.raw"}))(t)
	_, err := Open(t.Context(), openGood(t, path), Options{PersistentDir: dirs[0]})
	require.ErrorContains(t, err, "symbolic link")
	unchanged()
}

// TestFilesThatAreLinks replaces each file of a disk by a symbolic or hard link. The file of
// another user that it leads to stays unchanged.
func TestFilesThatAreLinks(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	for kind, link := range map[string]func(old, new string) error{"symbolic": os.Symlink,
		"hard": os.Link} {
		for _, persistent := range []bool{false, true} {
			for _, mode := range []CopyMode{CopyClone, CopyOnWrite} {
				for _, name := range []string{"lock", "", ".live", ".map", ".live.partial",
					".partial", "state", "state.partial", "state.spare", "unit", "unit/kept",
					"unit/kept.partial", "unit/.spare"} {
					t.Run(kind+"/"+string(mode)+"/"+name, func(t *testing.T) {
						victim, unchanged := foreign(t, "kept")
						opt := Options{WorkDir: t.TempDir(), Mode: mode}
						if persistent {
							opt = Options{PersistentDir: t.TempDir(), Mode: mode}
						}
						inst, _ := start(t, path, opt)
						inst.copies.done.Wait()
						require.NoError(t, inst.Store().Save("kept", []byte("x")))
						require.NoError(t, inst.Close())
						store, place, target := filepath.Dir(inst.Store().Where("kept")),
							inst.dir.disk()+name, filepath.Join(victim, "kept")
						switch base, rest, _ := strings.Cut(name, "/"); {
						case name == "lock":
							place = inst.dir.lock.Name()
						case strings.HasPrefix(name, "state"):
							place = inst.dir.state() + strings.TrimPrefix(name, "state")
						case name == "unit" && kind == "hard":
							return // there are no hard links to directories
						case name == "unit":
							place, target = store, victim
						case base == "unit":
							place = filepath.Join(store, rest)
						}
						require.NoError(t, os.RemoveAll(place))
						require.NoError(t, link(target, place))

						for range 2 {
							opt.Identity.Serial += "s" // so that the state is saved
							img := openGood(t, path)
							again, err := Open(t.Context(), img, opt)
							unchanged()
							if err != nil {
								require.ErrorContains(t, err, inst.dir.path)
								continue
							}
							filetest.Write(t, again, filetest.Block('w', 4096), 0)
							_ = again.Store().Save("kept", filetest.Block('k', 100))
							_ = again.Store().Save("kept", nil)
							require.NoError(t, again.Flush())
							require.NoError(t, again.Close())
							unchanged()
						}
					})
				}
			}
		}
	}
}

// TestDirectoryThatIsExchanged: renaming the directory of a disk in use does not make us write
// elsewhere.
func TestDirectoryThatIsExchanged(t *testing.T) {
	victim, unchanged := foreign(t, stateName, diskName)
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	work := t.TempDir()
	inst, _ := start(t, path, Options{WorkDir: work, Mode: CopyOnWrite})
	inst.copies.done.Wait()
	require.NoError(t, os.Rename(inst.dir.path, filepath.Join(work, "away")))
	require.NoError(t, os.Symlink(victim, inst.dir.path))
	store := inst.Store()
	require.ErrorContains(t, store.Save("kept", []byte("x")), "is not the directory any more")
	store.May = nil
	require.ErrorIs(t, store.Save("kept", []byte("x")), unix.ELOOP)
	require.ErrorIs(t, inst.copies.state.save(inst.dir.state(), true), unix.ELOOP)
	require.ErrorIs(t, inst.dir.removeMaps(), unix.ELOOP)
	require.ErrorIs(t, inst.dir.clear(), unix.ELOOP)
	unchanged()
}

// TestLinksOfTheOperator: a path that the operator names may be a link or contain one, like
// /var/run.
func TestLinksOfTheOperator(t *testing.T) {
	real, links := t.TempDir(), t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(real, "below"), 0o700))
	require.NoError(t, os.Symlink(real, filepath.Join(links, "run")))
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	for _, dir := range []string{"run", "run/below", "run/new"} {
		opt := Options{WorkDir: filepath.Join(links, dir), Owner: "us"}
		inst, _ := start(t, path, opt)
		settle(t, inst)
		require.NoError(t, inst.Close())
		again, _ := start(t, path, opt)
		require.True(t, again.kept)
		require.NoError(t, again.Close())
		left, _ := sweep(t, opt.WorkDir, t.TempDir(), "us")
		require.NotContains(t, left, "a.raw")
	}
	for _, images := range [][]string{{"a.raw"}, {"a.raw", "b.raw"}} {
		dirs := testtool.Must(PersistentDirs(filepath.Join(links, "run"), images))(t)
		inst, _ := start(t, path, Options{PersistentDir: dirs[0]})
		require.NoError(t, inst.Close())
		all := testtool.Must(filepath.Glob(filepath.Join(real, PersistentName+"*")))(t)
		for _, name := range all {
			require.NoError(t, os.RemoveAll(name))
		}
	}
	img := openGood(t, path)
	require.NoError(t, image.Convert(t.Context(), img, filepath.Join(links, "run", "out.raw"), true,
		nil))
	require.FileExists(t, filepath.Join(real, "out.raw"))
}

// TestDirectoryOfAnother: an ephemeral disk is not made in a directory of another user, unless a
// group shares it.
func TestDirectoryOfAnother(t *testing.T) {
	testtool.Needs(t, "root (to make a directory of another user)", os.Geteuid() == 0)
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	for name, c := range map[string]struct {
		mode     fs.FileMode
		uid, gid int
		refused  bool
	}{
		"ours":                 {0o700, 0, 0, false},
		"of a group volume":    {0o770 | fs.ModeSetgid, 1234, 0, false},
		"of another":           {0o700, 1234, 1234, true},
		"of another, readable": {0o755, 1234, 0, true},
		"for everybody":        {0o777, 1234, 1234, true},
	} {
		t.Run(name, func(t *testing.T) {
			work := t.TempDir()
			dir := filepath.Join(work, "a.raw")
			require.NoError(t, os.Mkdir(dir, 0o700))
			require.NoError(t, os.Chown(dir, c.uid, c.gid))
			require.NoError(t, os.Chmod(dir, c.mode))
			inst, err := Open(t.Context(), openGood(t, path), Options{WorkDir: work})
			if !c.refused {
				require.NoError(t, err)
				require.NoError(t, inst.Close())
				return
			}
			require.ErrorContains(t, err, dir)
			require.ErrorContains(t, err, "belongs to user 1234")
			filetest.Empty(t, dir)
		})
	}
}

// TestSweepFollowsNoLinks: a sweep follows no links and leaves the files of another user alone.
func TestSweepFollowsNoLinks(t *testing.T) {
	victim, unchanged := foreign(t, "kept")
	path, work := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0), t.TempDir()
	inst, _ := start(t, path, Options{WorkDir: work, Mode: CopyOnWrite, Owner: "us"})
	require.NoError(t, inst.Close())
	require.NoError(t, os.Symlink(victim, inst.dir.disk()+image.UnitInfix+"x"))
	require.NoError(t, os.MkdirAll(filepath.Join(filepath.Dir(inst.Store().Where("kept")), "below"),
		0o700))
	require.NoError(t, os.Symlink(victim,
		filepath.Join(filepath.Dir(inst.Store().Where("kept")), "below", "link")))
	elsewhere := t.TempDir()
	require.NoError(t, os.Rename(inst.dir.path, filepath.Join(elsewhere, "a.raw")))
	require.NoError(t, os.Symlink(filepath.Join(elsewhere, "a.raw"), inst.dir.path))
	left, _ := sweep(t, work, t.TempDir(), "us")
	require.Equal(t, []string{"a.raw"}, left)
	// It becomes a link after the names were read.
	d := workDirOf(work, "a.raw")
	require.NoError(t, d.sweep(t.TempDir(), nil, "us", zap.NewNop()))
	require.FileExists(t, filepath.Join(elsewhere, "a.raw", diskName))
	left, _ = sweep(t, elsewhere, t.TempDir(), "us")
	require.Empty(t, left)
	unchanged()
}

func TestConvertToALink(t *testing.T) {
	img := openGood(t, filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0))
	victim, unchanged := foreign(t, "kept")
	for kind, link := range map[string]func(old, new string) error{"symbolic": os.Symlink,
		"hard": os.Link} {
		out := filepath.Join(t.TempDir(), "out.raw")
		require.NoError(t, link(filepath.Join(victim, "kept"), out+durable.PartialSuffix))
		err := image.Convert(t.Context(), img, out, true, nil)
		require.Equal(t, kind == "symbolic", err != nil,
			"what was left behind is removed, and a link is named: %v", err)
		unchanged()
	}
}

// TestAFileIsADiskOrAnImage: while a guest writes to a file, nobody else takes it for an image or
// replaces it, and the other way round.
func TestAFileIsADiskOrAnImage(t *testing.T) {
	dir := t.TempDir()
	base := filetest.Put(t, dir, "base.raw", []byte("data"), 1<<20)
	other := filetest.Put(t, dir, "other.raw", []byte("other"), 1<<20)
	hold := image.Options{Hold: true}
	open := func(t *testing.T, path string) *image.Image {
		img := testtool.Must(image.Open(path, hold))(t)
		t.Cleanup(func() { img.Close() })
		return img
	}
	for name, opt := range map[string]Options{
		"in place":   {WorkDir: t.TempDir(), Mode: CopyNone},
		"persistent": {PersistentDir: t.TempDir(), Mode: CopyClone},
		"ephemeral":  {WorkDir: t.TempDir(), Mode: CopyClone},
	} {
		t.Run(name, func(t *testing.T) {
			inst := testtool.Must(Open(t.Context(), open(t, base), opt))(t)
			if opt.Mode == CopyClone {
				settle(t, inst)
			}
			_, err := image.Open(inst.path, hold)
			require.ErrorContains(t, err, "in use by another process")
			before := testtool.Must(os.Stat(inst.path))(t)
			err = image.Convert(t.Context(), open(t, other), inst.path, true, nil)
			require.ErrorAs(t, err, new(*durable.LockedError))
			require.True(t, os.SameFile(before, testtool.Must(os.Stat(inst.path))(t)))
			require.NoError(t, inst.Close())
			open(t, inst.path).Close()
		})
	}
	inPlace := func() error {
		inst, err := Open(t.Context(), open(t, base), Options{WorkDir: t.TempDir(), Mode: CopyNone})
		if err != nil {
			return err
		}
		return inst.Close()
	}
	qemu := testtool.Must(os.OpenFile(base, os.O_RDWR, 0))(t)
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1} // a machine may write to it
	require.NoError(t, unix.FcntlFlock(qemu.Fd(), unix.F_OFD_SETLK, &lock))
	require.ErrorContains(t, inPlace(), "in use by a virtual machine")
	require.NoError(t, qemu.Close())
	require.NoError(t, inPlace())
	below := open(t, base)
	require.ErrorAs(t, inPlace(), new(*durable.LockedError), "somebody reads it as an image")
	require.ErrorAs(t, image.Convert(t.Context(), open(t, other), base, true, nil),
		new(*durable.LockedError))
	require.NoError(t, below.Close())
	require.NoError(t, image.Convert(t.Context(), open(t, other), base, true, nil))
	require.NoFileExists(t, filepath.Join(dir, "base.raw"+durable.PartialSuffix))
}

// TestAMovedDirectory: while a disk is served, its directory is moved, and a copy is put in its
// place. No snapshot is made or deleted in the copy, and the disk goes on where it is.
func TestAMovedDirectory(t *testing.T) {
	dir := t.TempDir()
	path, away := filepath.Join(dir, "p"), filepath.Join(dir, "away")
	base := filetest.Put(t, t.TempDir(), "base.raw", []byte("data"), 1<<20)
	opt := Options{PersistentDir: path, Mode: CopyOnWrite}
	inst, _ := start(t, base, opt)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	require.NoError(t, os.Rename(path, away))
	require.NoError(t, os.CopyFS(path, os.DirFS(away)))
	want := filetest.Block('w', 512)
	write := func(off int64) {
		filetest.Write(t, inst, want, off)
		require.NoError(t, inst.Flush())
	}
	write(0)
	const moved = "is not the directory any more"
	require.ErrorContains(t, TakeSnapshot(t.Context(), "b", inst), moved)
	require.ErrorContains(t, inst.DeleteSnapshot(t.Context(), "a"), moved)
	require.ErrorContains(t, inst.Store().Save("handover", []byte("x")), moved)
	write(512)
	require.NoError(t, os.RemoveAll(path))
	require.NoError(t, os.Rename(away, path))
	require.NoError(t, TakeSnapshot(t.Context(), "c", inst))
	write(1024)
	require.NoError(t, inst.Close())
	inst, _ = start(t, base, opt)
	require.Equal(t, bytes.Repeat([]byte("w"), 1536), filetest.ReadAll(t, inst, 1536))
	require.Len(t, inst.Snapshots(), 2)
}
