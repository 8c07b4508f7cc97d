package instance

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// start opens an image as a daemon does, and returns the disk and the log.
func start(t *testing.T, path string, opt Options) (*Instance, *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	opt.Log = zap.New(core)
	inst := testtool.Must(Open(t.Context(), openGood(t, path), opt))(t)
	t.Cleanup(func() { inst.Close() })
	return inst, logs
}

// stateOf is what is recorded of a disk.
func stateOf(t testing.TB, inst *Instance) *state {
	t.Helper()
	return testtool.Must(loadState(inst.dir.state()))(t)
}

// settle waits until the disk is complete.
func settle(t *testing.T, inst *Instance) {
	t.Helper()
	if inst.copies != nil {
		inst.copies.done.Wait()
	}
	require.True(t, stateOf(t, inst).Complete)
}

// dropReason returns why the log says that an existing disk was not kept, or "".
func dropReason(logs *observer.ObservedLogs) string {
	for _, e := range logs.FilterLevelExact(zapcore.WarnLevel).All() {
		if reason, ok := e.ContextMap()["reason"].(string); ok {
			return reason
		}
	}
	return ""
}

func TestRestartKeepsTheDiskOfTheSameImage(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	content := filetest.Sample(3<<20, 1)
	path := filetest.Put(t, dir, "disk.raw", content, 0)
	opt := Options{WorkDir: work}

	first, logs := start(t, path, opt)
	require.False(t, first.kept)
	require.Empty(t, dropReason(logs), "there was no disk")
	require.Equal(t, 1, logs.FilterMessage("made a disk of the image").Len())
	require.Equal(t, filepath.Join(work, "disk.raw", "disk.raw"), first.path)
	require.Len(t, first.Identity.Serial, 20)
	require.Equal(t, byte(3), first.Identity.NAA[0]>>4)
	before := stateOf(t, first)
	require.Equal(t, "disk.raw", before.Image)
	require.Equal(t, CopyClone, before.Mode)
	filetest.Write(t, first, filetest.Block('w', 8192), 4096)
	copy(content[4096:], filetest.Block('w', 8192))
	require.NoError(t, first.Close())
	require.NoError(t, first.Close())

	again, logs := start(t, path, opt)
	require.True(t, again.kept)
	require.Equal(t, first.Identity, again.Identity)
	require.True(t, before.Created.Equal(stateOf(t, again).Created))
	require.True(t, bytes.Equal(content, filetest.ReadAll(t, again, again.Size())))
	require.Equal(t, 1, logs.FilterMessageSnippet("keeping the existing disk").Len())
	require.Zero(t, logs.FilterMessageSnippet("checking whether the image").Len(),
		"nothing is read")
	require.NoError(t, again.Close())

	// The same bytes with another inode and another time, as in a new container, are still the same
	// image.
	old := filetest.Content(t, path)
	require.NoError(t, os.Remove(path))
	filetest.Put(t, dir, "disk.raw", old, 0)
	require.NoError(t, os.Chtimes(path, time.Unix(1, 0), time.Unix(1, 0)))
	moved, logs := start(t, path, opt)
	require.Equal(t, 1, logs.FilterMessageSnippet("checking whether the image").Len(),
		"reading takes time")
	require.True(t, moved.kept)
	require.Equal(t, first.Identity, moved.Identity)
	require.NoError(t, moved.Close())
	s := testtool.Must(loadState(filepath.Join(work, "disk.raw", stateName)))(t)
	require.EqualValues(t, 1e9, s.Chain[0].MTime, "the next start need not read it")
}

func TestRestartDoesNotKeepTheDisk(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(t *testing.T, image, work string)
		reason string
	}{
		{"image of another size",
			func(t *testing.T, image, _ string) { require.NoError(t, os.Truncate(image, 4<<20)) },
			"virtual size"},
		{"image of the same size", func(t *testing.T, image, _ string) {
			filetest.Put(t, filepath.Dir(image), "disk.raw", filetest.Sample(3<<20, 2), 0)
		}, `content of "disk.raw"`},
		{"state is missing", func(t *testing.T, _, work string) {
			require.NoError(t, os.Remove(filepath.Join(work, stateName)))
		}, "state file is missing"},
		{"state is damaged", func(t *testing.T, _, work string) {
			path := filepath.Join(work, stateName)
			text := filetest.Content(t, path)
			text = bytes.Replace(text, []byte(`"image":"disk.raw"`), []byte(`"image":"disk.rax"`),
				1)
			require.NoError(t, os.WriteFile(path, text, 0o600))
		}, "checksum"},
		{"state is empty", func(t *testing.T, _, work string) {
			require.NoError(t, os.Truncate(filepath.Join(work, stateName), 0))
		}, "damaged"},
		{"state is a link", func(t *testing.T, _, work string) {
			path := filepath.Join(work, stateName)
			require.NoError(t, os.Rename(path, path+"2"))
			require.NoError(t, os.Symlink(path+"2", path))
		}, "symbolic link"},
		{"disk is too short", func(t *testing.T, _, work string) {
			require.NoError(t, os.Truncate(filepath.Join(work, diskName), 512))
		}, "512 bytes"},
		{"disk is missing", func(t *testing.T, _, work string) {
			require.NoError(t, os.Remove(filepath.Join(work, diskName)))
		}, "missing"},
		{"disk is a link", func(t *testing.T, _, work string) {
			path := filepath.Join(work, diskName)
			require.NoError(t, os.Rename(path, path+"2"))
			require.NoError(t, os.Symlink(path+"2", path))
		}, "not a regular file"},
		{"machine was restarted", func(t *testing.T, _, work string) {
			rewrite(t, work, func(s *state) { s.Boot = "another" })
		}, "restarted"},
		{"another mode", func(t *testing.T, _, work string) {
			rewrite(t, work, func(s *state) { s.Mode = CopyNone })
		}, `copy mode "none"`},
		{"state of another image",
			func(t *testing.T, _, work string) {
				rewrite(t, work, func(s *state) { s.Image = "x" })
			}, `image "x"`},
		{"state of another version",
			func(t *testing.T, _, work string) {
				rewrite(t, work, func(s *state) { s.Version = 1 })
			}, "version 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, work := t.TempDir(), t.TempDir()
			path := filetest.Put(t, dir, "disk.raw", filetest.Sample(3<<20, 1), 0)
			opt := Options{WorkDir: work}
			first, _ := start(t, path, opt)
			filetest.Write(t, first, filetest.Block('w', 512), 0)
			require.NoError(t, first.Close())
			c.change(t, path, filepath.Join(work, "disk.raw"))

			again, logs := start(t, path, opt)
			require.False(t, again.kept)
			require.Contains(t, dropReason(logs), c.reason)
			require.NotEqual(t, first.Identity, again.Identity)
			want := filetest.Content(t, path)
			require.True(t, bytes.Equal(want, filetest.ReadAll(t, again, again.Size())),
				"the image as it is now")
			require.NoError(t, again.Close())
			third, _ := start(t, path, opt)
			require.True(t, third.kept)
		})
	}
}

// rewrite changes the state in a work directory and seals it again.
func rewrite(t *testing.T, work string, change func(*state)) {
	t.Helper()
	s := testtool.Must(loadState(filepath.Join(work, stateName)))(t)
	change(s)
	require.NoError(t, s.save(filepath.Join(work, stateName), false))
}

func TestRestartNoticesAChangedBackingFile(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	filetest.Put(t, dir, "base.raw", filetest.Sample(1<<20, 1), 0)
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw",
		"top.qcow2")
	top := filepath.Join(dir, "top.qcow2")
	opt := Options{WorkDir: work}
	first, _ := start(t, top, opt)
	require.NoError(t, first.Close())
	again, _ := start(t, top, opt)
	require.True(t, again.kept)
	require.NoError(t, again.Close())
	filetest.Put(t, dir, "base.raw", filetest.Sample(1<<20, 2), 0)
	changed, logs := start(t, top, opt)
	require.False(t, changed.kept)
	require.Contains(t, dropReason(logs), "base.raw")
	require.NoError(t, changed.Close())
	filetest.QemuImg(t, dir, "rebase", "-f", "qcow2", "-b", "", "top.qcow2")
	flat, logs := start(t, top, opt)
	require.False(t, flat.kept)
	require.Contains(t, dropReason(logs), "0 backing files now, and had 1")
}

// TestStartAfterAKillInTheMiddle: kill -9 at any instant leaves temporary files, or a disk without
// its state, but never a partial disk that is used.
func TestStartAfterAKillInTheMiddle(t *testing.T) {
	content := filetest.Sample(3<<20, 1)
	for _, c := range []struct {
		name string
		left map[string][]byte
	}{
		{"while it is expanded",
			map[string][]byte{diskName + durable.PartialSuffix: filetest.Block('p', 1<<20)}},
		{"before the state", map[string][]byte{diskName: filetest.Block('p', 3<<20)}},
		{"while the state is written",
			map[string][]byte{diskName: filetest.Block('p', 3<<20),
				stateName + durable.PartialSuffix: []byte(`{"xx`)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, work := t.TempDir(), t.TempDir()
			path := filetest.Put(t, dir, "disk.raw", content, 0)
			for name, left := range c.left {
				filetest.Put(t, filepath.Join(work, "disk.raw"), name, left, 0)
			}
			filetest.Put(t, filepath.Join(work, "disk.raw"), durable.LockName, []byte("1 gone\n"),
				0)
			inst, _ := start(t, path, Options{WorkDir: work})
			require.False(t, inst.kept)
			require.True(t, bytes.Equal(content, filetest.ReadAll(t, inst, inst.Size())))
			settle(t, inst) // until then, the state may be in the middle of being written
			left, err := filepath.Glob(filepath.Join(work, "*", "*"+durable.PartialSuffix))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

func TestOneWorkDirectoryOneDaemon(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	first, _ := start(t, path, Options{WorkDir: work})
	_, err := Open(t.Context(), openGood(t, path), Options{WorkDir: work})
	var locked *durable.LockedError
	require.ErrorAs(t, err, &locked)
	require.Contains(t, err.Error(), work)
	require.Regexp(t, `process \d+`, locked.Holder)

	lock := filepath.Join(work, "disk.raw", durable.LockName)
	for content, want := range map[string]string{"": "another process", "x": "another process",
		"12 elsewhere\n": `process 12 on host "elsewhere"`} {
		require.NoError(t, os.WriteFile(lock, []byte(content), 0o600))
		_, err = Open(t.Context(), openGood(t, path), Options{WorkDir: work})
		require.ErrorAs(t, err, &locked)
		require.Equal(t, want, locked.Holder)
	}
	require.NoError(t, first.Close())
	again, _ := start(t, path, Options{WorkDir: work})
	require.True(t, again.kept)
}

func TestModeNoneServesTheFileItself(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	opt := Options{WorkDir: work, Mode: CopyNone}
	first, _ := start(t, path, opt)
	require.Equal(t, path, first.path)
	require.False(t, first.ReadOnly)
	require.True(t, first.durable)
	filetest.Write(t, first, filetest.Block('w', 512), 512)
	require.NoError(t, first.Flush())
	require.Equal(t, filetest.Block('w', 512), filetest.Content(t, path)[512:1024])

	// Another daemon, even with a work directory of its own, cannot write to the same file.
	_, err := Open(t.Context(), openGood(t, path), Options{WorkDir: t.TempDir(), Mode: CopyNone})
	var locked *durable.LockedError
	require.ErrorAs(t, err, &locked)
	require.Contains(t, err.Error(), path)
	require.NoError(t, first.Close())

	again, _ := start(t, path, opt)
	require.Equal(t, first.Identity, again.Identity,
		"the identity is kept although the content has changed")
	require.NoError(t, again.Close())

	readOnly, _ := start(t, path, Options{WorkDir: work, Mode: CopyNone, ReadOnly: true})
	require.True(t, readOnly.ReadOnly)
	_, err = readOnly.WriteAt(t.Context(), filetest.Block('w', 512), 0)
	require.ErrorIs(t, err, disk.ErrReadOnly)
	require.Equal(t, first.Identity, readOnly.Identity)
	require.NoError(t, readOnly.Close())

	// The files of a clone are removed, and the log says so.
	clone, _ := start(t, path, Options{WorkDir: work})
	require.NotEqual(t, first.Identity, clone.Identity)
	require.NoError(t, clone.Close())
	back, logs := start(t, path, opt)
	require.NoFileExists(t, clone.path)
	require.Equal(t, 1, logs.FilterMessageSnippet("removing the disk of an earlier start").Len())
	require.NotEqual(t, clone.Identity, back.Identity)
}

func TestModeNoneOnAReadOnlyFileSystem(t *testing.T) {
	dir := filetest.TinyFS(t, "2m")
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	require.NoError(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	inst, logs := start(t, path, Options{WorkDir: t.TempDir(), Mode: CopyNone})
	require.True(t, inst.ReadOnly)
	require.Equal(t, 1, logs.FilterMessageSnippet("read-only").Len())
	_, err := inst.WriteAt(t.Context(), filetest.Block('w', 512), 0)
	require.ErrorIs(t, err, disk.ErrReadOnly)
}

func TestModeNoneOfAnExchangedFile(t *testing.T) {
	dir := t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	img := openGood(t, path)
	require.NoError(t, os.Rename(path, path+".old"))
	filetest.Put(t, dir, "disk.raw", []byte("QFI\xfb"), 1<<20)
	_, err := Open(t.Context(), img, Options{WorkDir: t.TempDir(), Mode: CopyNone})
	require.ErrorContains(t, err, "exchanged")

	// What replaces the file, such as convert, has its lock meanwhile.
	filetest.Put(t, dir, "disk.raw", []byte("former"), 1<<20)
	other := filetest.Put(t, dir, "other.raw", []byte("latter"), 1<<20)
	img = openGood(t, path)
	opens := testtool.Must(unix.InotifyInit1(unix.IN_CLOEXEC))(t)
	defer unix.Close(opens)
	convert := testtool.Must(os.Open(path))(t)
	require.NoError(t, unix.Flock(int(convert.Fd()), unix.LOCK_EX))
	_ = testtool.Must(unix.InotifyAddWatch(opens, path, unix.IN_OPEN))(t)
	opened := make(chan error, 1)
	go func() {
		_, err := Open(t.Context(), img, Options{WorkDir: t.TempDir(), Mode: CopyNone})
		opened <- err
	}()
	_ = testtool.Must(unix.Read(opens, make([]byte, 4096)))(t)
	require.NoError(t, os.Rename(other, path))
	require.NoError(t, convert.Close())
	require.ErrorContains(t, <-opened, "replaced while it was opened")
}

func TestModes(t *testing.T) {
	dir := t.TempDir()
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "a.qcow2", "1M")
	img := openGood(t, filepath.Join(dir, "a.qcow2"))
	var mode *UnsupportedModeError
	_, err := Open(t.Context(), img, Options{WorkDir: dir, Mode: CopyNone})
	require.ErrorAs(t, err, &mode)
	require.Equal(t, "a.qcow2", mode.Image)
	require.Contains(t, err.Error(), "only a raw one")
	require.NoError(t, CopyNone.Check(nil))
	for _, m := range []CopyMode{CopyClone, CopyOnWrite, CopyOnRead} {
		require.NoError(t, m.Check(img))
	}
	require.Error(t, CopyMode("x").Check(nil))
	for _, s := range []string{"none", "copy-on-write", "copy-on-read", "clone"} {
		require.Equal(t, s, string(testtool.Must(ParseCopyMode(s))(t)))
	}
	require.Equal(t, CopyClone, testtool.Must(ParseCopyMode(""))(t))
	require.ErrorContains(t, testtool.Err(ParseCopyMode("Clone")), "copy-on-write")
}

func TestWorkDirThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	_, err := Open(t.Context(), openGood(t, path), Options{})
	require.ErrorContains(t, err, "work directory")
	_, err = Open(t.Context(), openGood(t, path),
		Options{WorkDir: filetest.Put(t, dir, "file", nil, 0)})
	require.ErrorContains(t, err, "work directory")
	require.ErrorContains(t, err, "name a directory")
	_, err = Open(t.Context(), openGood(t, path),
		Options{WorkDir: t.TempDir(),
			PersistentDir: filetest.Put(t, dir, PersistentName, nil, 512)})
	require.ErrorContains(t, err, "persistent directory")
	require.ErrorContains(t, err, "name a directory", "and not the file in it")
}

func TestReadOnlyClone(t *testing.T) {
	dir := t.TempDir()
	inst, _ := start(t, filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20),
		Options{WorkDir: t.TempDir(), ReadOnly: true})
	require.True(t, inst.ReadOnly)
	_, err := inst.WriteAt(t.Context(), filetest.Block('w', 512), 0)
	require.ErrorIs(t, err, disk.ErrReadOnly)
}

func TestDurableDiskSurvivesARestartOfTheMachine(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	for i, c := range []struct{ durable, kept bool }{
		// a run without flushes does not keep it
		{true, false}, {true, true}, {false, true}, {false, false},
	} {
		inst, _ := start(t, path, Options{WorkDir: work, Durable: c.durable})
		require.Equal(t, c.kept, inst.kept, "start %d", i)
		require.NoError(t, inst.Close())
		rewrite(t, filepath.Join(work, "disk.raw"), func(s *state) { s.Boot = "another" })
	}
}

func TestEscapeName(t *testing.T) {
	seen := make(map[string]string)
	long := strings.Repeat("x", 250)
	for _, name := range []string{"disk.raw", ".raw", "%2Eraw", "a b", "a%20b", "ä", "\n", long,
		long + "y", strings.Repeat("ä", 120), "-x"} {
		dir := escapeName(name)
		require.LessOrEqual(t, len(dir), maxEscaped)
		require.True(t, filepath.IsLocal(dir) && !strings.Contains(dir, "/") && dir[0] != '.', "%q",
			dir)
		require.NotContains(t, seen, dir, "%q and %q", name, seen[dir])
		seen[dir] = name
	}
	require.Equal(t, "fedora-40.x86_64.qcow2", escapeName("fedora-40.x86_64.qcow2"))
}

// TestCompleteClone: a complete clone is just its file. It needs neither its map nor the image, and
// any mode can continue with it.
func TestCompleteClone(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	content := filetest.Sample(5<<20, 1)
	path := filetest.Put(t, dir, "disk.raw", content, 0)
	progress := new(image.Progress)
	first, logs := start(t, path, Options{WorkDir: work, Progress: progress})
	settle(t, first)
	require.True(t, progress.Finished())
	require.Equal(t, 1, logs.FilterMessageSnippet("the disk is complete").Len())
	done, data := progress.Data()
	require.Equal(t, data, done)
	require.NoFileExists(t, first.path+".live")
	require.True(t, bytes.Equal(content, filetest.ReadAll(t, first, first.Size())))
	filetest.Write(t, first, filetest.Block('w', 512), 512)
	copy(content[512:], filetest.Block('w', 512))
	require.NoError(t, first.Close())

	again, _ := start(t, path, Options{WorkDir: work, Mode: CopyOnWrite})
	require.True(t, again.kept)
	require.Nil(t, again.copies, "the image is not needed")
	require.True(t, bytes.Equal(content, filetest.ReadAll(t, again, again.Size())))
}

// TestModesOfOneDisk: an overlay may change its mode without losing a write on the way to a
// complete disk.
func TestModesOfOneDisk(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	content := filetest.Sample(5<<20, 1)
	path := filetest.Put(t, dir, "disk.raw", content, 0)
	for i, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		inst, _ := start(t, path, Options{WorkDir: work, Mode: mode})
		require.Equal(t, i > 0, inst.kept)
		off := 1<<20 + i*4096 + 512
		filetest.Write(t, inst, filetest.Block(byte('a'+i), 1024), int64(off))
		copy(content[off:], filetest.Block(byte('a'+i), 1024))
		require.True(t, bytes.Equal(content, filetest.ReadAll(t, inst, inst.Size())))
		if mode == CopyClone {
			settle(t, inst)
			require.True(t, bytes.Equal(content, filetest.ReadAll(t, inst, inst.Size())))
		}
		require.NoError(t, inst.Close())
	}
}
