package smallfile

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
)

func TestStore(t *testing.T) {
	t.Run("durable", func(t *testing.T) { testStore(t, true) })
	t.Run("ephemeral", func(t *testing.T) { testStore(t, false) })
}

func testStore(t *testing.T, durable bool) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "unit")
	s := NewStore(dir, durable)
	got, err := s.Load("mode-pages")
	require.NoError(t, err)
	require.Nil(t, got)
	require.NoError(t, s.Save("mode-pages", nil), "nothing to forget")
	require.NoDirExists(t, dir, "nothing was kept yet")

	largest := bytes.Repeat([]byte{7}, maxSmall-storeSum)
	for _, content := range [][]byte{[]byte("one"), largest, {0}} {
		require.NoError(t, s.Save("mode-pages", content))
		got, err = NewStore(dir, durable).Load("mode-pages")
		require.NoError(t, err)
		require.Equal(t, content, got)
	}
	require.ErrorContains(t, s.Save("mode-pages", append(largest, 7)), "mode-pages cannot hold")
	require.NoError(t, s.Save("sanitize", []byte("y")))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Equal(t, []string{SpareSuffix, "mode-pages", "sanitize"}, filetest.FileNames(entries),
		"one file per name, and a spare")
	info, err := os.Stat(filepath.Join(dir, "sanitize"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode())

	require.NoError(t, s.Save("mode-pages", nil))
	got, err = s.Load("mode-pages")
	require.NoError(t, err)
	require.Nil(t, got)
}

// Content and name reach storage in this order, before Save returns, and the name of the directory
// before them.
func TestStoreOrder(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "unit")
	path := filepath.Join(dir, "sanitize")
	s := NewStore(dir, true)
	var synced []string
	s.sync = func(f *os.File) error {
		name, err := filepath.Rel(parent, f.Name())
		require.NoError(t, err)
		_, err = os.Lstat(path)
		require.Equal(t, name == "unit" && len(synced) < 3, err == nil, "%s is flushed", name)
		synced = append(synced, name)
		return nil
	}
	require.NoError(t, s.Save("sanitize", []byte("new")))
	require.Equal(t, []string{".", "unit/sanitize.partial", "unit"}, synced)
	require.NoError(t, s.Save("sanitize", nil))
	require.Equal(t, "unit", synced[len(synced)-1], "also that something is forgotten")
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
	got, err := s.Load("kept")
	require.NoError(t, err)
	require.Equal(t, "old", string(got), "content that may not have reached storage gets no name")
	require.ErrorIs(t, s.Save("kept", nil), unix.EIO)

	s.sync = (*os.File).Sync
	filetest.Put(t, dir, "kept.partial", []byte("left by a killed process"), 0)
	require.NoError(t, s.Save("kept", []byte("next")))
	// A name that a directory takes cannot be replaced, and what was begun is not left behind.
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "taken", "by"), 0o755))
	require.Error(t, s.Save("taken", []byte("x")))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Equal(t, []string{SpareSuffix, "kept", "taken"}, filetest.FileNames(entries))
}

// Whatever else is in a file of the store is noticed, and the message says which one.
func TestStoreRefuses(t *testing.T) {
	for want, make := range map[string]func(path string) error{
		"is a symbolic link": func(path string) error {
			return os.Symlink("/etc/passwd",
				path)
		},
		"is not a regular file": func(path string) error { return unix.Mkfifo(path, 0o600) },
		"is damaged: its checksum": func(path string) error {
			return os.WriteFile(path, nil,
				0o600)
		},
		"is far too large": func(path string) error {
			return os.WriteFile(path,
				bytes.Repeat([]byte{1}, maxSmall+1), 0o600)
		},
		"; remove it to go on with": func(path string) error {
			return os.WriteFile(path,
				[]byte("something"), 0o600)
		},
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
	good, err := os.ReadFile(filepath.Join(dir, "sanitize"))
	require.NoError(t, err)
	for i := range len(good) * 8 {
		bad := bytes.Clone(good)
		bad[i/8] ^= 1 << (i % 8)
		filetest.Put(t, dir, "sanitize", bad, 0)
		_, err := s.Load("sanitize")
		require.ErrorContains(t, err, "damaged", "bit %d", i)
	}
}
