package durable

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

func TestStore(t *testing.T) {
	t.Run("durable", func(t *testing.T) { testStore(t, true) })
	t.Run("ephemeral", func(t *testing.T) { testStore(t, false) })
}

func testStore(t *testing.T, durable bool) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "unit")
	s := NewStore(dir, durable)
	got := testtool.Must(s.Load("mode-pages"))(t)
	require.Nil(t, got)
	require.NoError(t, s.Save("mode-pages", nil), "nothing to forget")
	require.NoDirExists(t, dir, "nothing was saved yet")

	largest := bytes.Repeat([]byte{7}, maxSmall-storeSum)
	for _, content := range [][]byte{[]byte("one"), largest, {0}} {
		require.NoError(t, s.Save("mode-pages", content))
		got = testtool.Must(NewStore(dir, durable).Load("mode-pages"))(t)
		require.Equal(t, content, got)
	}
	require.ErrorContains(t, s.Save("mode-pages", append(largest, 7)), "mode-pages cannot hold")
	require.NoError(t, s.Save("sanitize", []byte("y")))
	require.Equal(t, []string{SpareSuffix, "mode-pages", "sanitize"}, filetest.Names(t, dir),
		"one file per name, and a spare")
	require.EqualValues(t, 0o600, testtool.Must(os.Stat(filepath.Join(dir, "sanitize")))(t).Mode())

	require.NoError(t, s.Save("mode-pages", nil))
	got = testtool.Must(s.Load("mode-pages"))(t)
	require.Nil(t, got)
}

// TestStoreOrder checks that the directory's name, the content and the file's name reach storage in
// this order, before Save returns.
func TestStoreOrder(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "unit")
	path := filepath.Join(dir, "sanitize")
	s := NewStore(dir, true)
	var synced []string
	s.sync = func(f *os.File) error {
		name := testtool.Must(filepath.Rel(parent, f.Name()))(t)
		_, err := os.Lstat(path)
		require.Equal(t, name == "unit" && len(synced) < 3, err == nil, "%s is flushed", name)
		synced = append(synced, name)
		return nil
	}
	require.NoError(t, s.Save("sanitize", []byte("new")))
	require.Equal(t, []string{".", "unit/sanitize.partial", "unit"}, synced)
	require.NoError(t, s.Save("sanitize", nil))
	require.Equal(t, "unit", synced[len(synced)-1], "forgetting is synced, too")
}

func TestStoreFails(t *testing.T) {
	file := filetest.Put(t, t.TempDir(), "file", nil, 0)
	s := NewStore(filepath.Join(file, "below"), true)
	require.Error(t, s.Save("a", []byte("x")))
	_, err := s.Load("a")
	require.ErrorIs(t, err, unix.ENOTDIR)
	require.ErrorContains(t, err, "below/a")

	dir := t.TempDir()
	s = NewStore(dir, true)
	require.NoError(t, s.Save("kept", []byte("old")))
	s.sync = func(*os.File) error { return unix.EIO }
	require.ErrorIs(t, s.Save("kept", []byte("new")), unix.EIO)
	got := testtool.Must(s.Load("kept"))(t)
	require.Equal(t, "old", string(got), "content that may not have reached storage does not "+
		"replace the old")
	require.ErrorIs(t, s.Save("kept", nil), unix.EIO)

	s.sync = (*os.File).Sync
	filetest.Put(t, dir, "kept.partial", []byte("left by a killed process"), 0)
	require.NoError(t, s.Save("kept", []byte("next")))
	// A directory has this name, so Save fails. It leaves no partial file behind.
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "taken", "by"), 0o755))
	require.Error(t, s.Save("taken", []byte("x")))
	require.Equal(t, []string{SpareSuffix, "kept", "taken"}, filetest.Names(t, dir))
}

// TestStoreRefuses checks that Load notices every other content, and that the message names the
// file.
func TestStoreRefuses(t *testing.T) {
	write := func(content []byte) func(path string) error {
		return func(path string) error { return os.WriteFile(path, content, 0o600) }
	}
	for want, make := range map[string]func(path string) error{
		"is a symbolic link": func(path string) error {
			return os.Symlink("/etc/passwd", path)
		},
		"is not a regular file":     func(path string) error { return unix.Mkfifo(path, 0o600) },
		"is damaged: its checksum":  write(nil),
		"is far too large":          write(bytes.Repeat([]byte{1}, maxSmall+1)),
		"; remove it to go on with": write([]byte("something")),
	} {
		dir := t.TempDir()
		require.NoError(t, make(filepath.Join(dir, "sanitize")))
		_, err := NewStore(dir, true).Load("sanitize")
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, filepath.Join(dir, "sanitize"))
	}
	dir := t.TempDir()
	s := NewStore(dir, false)
	require.NoError(t, s.Save("sanitize", []byte("content")))
	good := testtool.Must(os.ReadFile(filepath.Join(dir, "sanitize")))(t)
	for i := range len(good) * 8 {
		bad := bytes.Clone(good)
		bad[i/8] ^= 1 << (i % 8)
		filetest.Put(t, dir, "sanitize", bad, 0)
		require.ErrorContains(t, testtool.Err(s.Load("sanitize")), "damaged", "bit %d", i)
	}
}

// TestRecordThatIsTooLarge: a record that could not be read again is not saved. A snapshot of which
// tens of thousands of clones were made would have one.
func TestRecordThatIsTooLarge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record")
	require.NoError(t, SaveRecord(path, "before", nil, nil))
	err := SaveRecord(path, strings.Repeat("x", maxSmall), nil, nil)
	require.ErrorContains(t, err, "cannot hold")
	require.ErrorContains(t, err, path)
	var kept string
	require.NoError(t, LoadRecord(path, &kept))
	require.Equal(t, "before", kept)
}

// TestReleaseLock: a lock that is released can be had at once, although a process that is just
// being started still has a copy of the open file.
func TestReleaseLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), LockName)
	f := testtool.Must(AcquireLock(path, "the directory"))(t)
	copied := testtool.Must(unix.Dup(int(f.Fd())))(t)
	defer unix.Close(copied)
	var locked *LockedError
	require.ErrorAs(t, testtool.Err(AcquireLock(path, "the directory")), &locked)
	require.NoError(t, ReleaseLock(f))
	f = testtool.Must(AcquireLock(path, "the directory"))(t)
	require.NoError(t, ReleaseLock(f))
}

// TestAcquireDiskLock: who does not empty the lock file at the end counts as killed, also if there
// was no space for what the file says.
func TestAcquireDiskLock(t *testing.T) {
	path := filepath.Join(filetest.TinyFS(t, "256k"), LockName)
	for _, c := range []struct{ killed, empties, full bool }{{empties: true}, {full: true},
		{killed: true}, {killed: true, empties: true}, {}} {
		if c.full {
			filetest.Fill(t, filepath.Dir(path))
		}
		f, killed := testtool.Must2(AcquireDiskLock(path, "the disk"))(t)
		require.Equal(t, c.killed, killed)
		if c.empties {
			require.NoError(t, f.Truncate(0))
		}
		require.NoError(t, ReleaseLock(f))
	}
}
