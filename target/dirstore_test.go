package target

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDirStore(t *testing.T) {
	t.Run("durable", func(t *testing.T) { testDirStore(t, true) })
	t.Run("ephemeral", func(t *testing.T) { testDirStore(t, false) })
}

func testDirStore(t *testing.T, durable bool) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "lun", "state")
	s := NewDirStore(dir, durable)
	got, err := s.Load("mode-pages")
	require.NoError(t, err)
	require.Nil(t, got)
	require.NoError(t, s.Save("mode-pages", nil), "nothing to forget")
	_, err = os.Stat(dir)
	require.ErrorIs(t, err, os.ErrNotExist, "nothing was kept yet")

	for _, content := range []string{"one", "another, longer one", "x"} {
		require.NoError(t, s.Save("mode-pages", []byte(content)))
		got, err = NewDirStore(dir, durable).Load("mode-pages")
		require.NoError(t, err)
		require.Equal(t, content, string(got))
	}
	require.NoError(t, s.Save("sanitize", []byte("y")))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2, "one file per name, and no others")

	require.NoError(t, s.Save("mode-pages", nil))
	got, err = s.Load("mode-pages")
	require.NoError(t, err)
	require.Nil(t, got)
}

func TestDirStoreFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	s := NewDirStore(filepath.Join(file, "below"), true)
	require.Error(t, s.Save("a", []byte("x")))
	_, err := s.Load("a")
	require.Error(t, err)

	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "big"), bytes.Repeat([]byte{1}, maxStored+1), 0o600))
	_, err = NewDirStore(dir, true).Load("big")
	require.ErrorContains(t, err, "big")
	// A name that a directory takes cannot be replaced, and what was begun is not left behind.
	require.NoError(t, os.Mkdir(filepath.Join(dir, "taken"), 0o755))
	require.Error(t, NewDirStore(dir, true).Save("taken", []byte("x")))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2)
}
