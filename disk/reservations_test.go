package disk

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestReservationFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "reservations")
	r := NewReservationFile(path)
	b, err := r.Load()
	require.NoError(t, err)
	require.Nil(t, b, "nothing was ever saved")

	for _, content := range [][]byte{[]byte("one"), bytes.Repeat([]byte{7}, maxReservations), {0}} {
		require.NoError(t, r.Save(content))
		b, err = NewReservationFile(path).Load()
		require.NoError(t, err)
		require.Equal(t, content, b)
	}
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, names, 1, "nothing is left beside it")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode())

	require.ErrorContains(t, r.Save(nil), "cannot hold 0 bytes")
	require.ErrorContains(t, r.Save(make([]byte, maxReservations+1)), "cannot hold")
}

// TestReservationFileOrder checks that content and name reach storage in this order, and before Save returns.
func TestReservationFileOrder(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "reservations")
	r := NewReservationFile(path)
	var synced []string
	r.sync = func(f *os.File) error {
		name := filepath.Base(f.Name())
		if info, err := f.Stat(); err == nil && info.IsDir() {
			name = "directory"
			b, err := os.ReadFile(path)
			require.NoError(t, err, "renamed before the directory is flushed")
			require.Equal(t, "new", string(b))
		} else {
			require.NoFileExists(t, path, "flushed before it is renamed")
		}
		synced = append(synced, name)
		return nil
	}
	require.NoError(t, r.Save([]byte("new")))
	require.Equal(t, []string{"reservations.new", "directory"}, synced)
}

func TestReservationFileFailures(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "reservations")
	r := NewReservationFile(path)
	require.NoError(t, r.Save([]byte("old")))

	r.sync = func(*os.File) error { return unix.EIO }
	require.ErrorIs(t, r.Save([]byte("new")), unix.EIO)
	require.NoFileExists(t, path+".new")
	b, err := r.Load()
	require.NoError(t, err)
	require.Equal(t, "old", string(b), "content that may not have reached storage gets no name")

	r.sync = (*os.File).Sync
	require.NoError(t, os.WriteFile(path+".new", []byte("left by a killed process"), 0o600))
	require.NoError(t, r.Save([]byte("next")))
	require.NoFileExists(t, path+".new")

	require.NoError(t, os.MkdirAll(filepath.Join(path+".new", "in the way"), 0o700))
	require.Error(t, r.Save([]byte("never")))
	b, err = r.Load()
	require.NoError(t, err)
	require.Equal(t, "next", string(b))

	require.ErrorIs(t, NewReservationFile(filepath.Join(dir, "missing", "file")).Save([]byte("x")), os.ErrNotExist)
}

func TestReservationFileRefuses(t *testing.T) {
	for want, make := range map[string]func(path string) error{
		"symbolic link":      func(path string) error { return os.Symlink("/etc/passwd", path) },
		"not a regular file": func(path string) error { return unix.Mkfifo(path, 0o600) },
		"is empty":           func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"far too large":      func(path string) error { return os.WriteFile(path, nil, 0o600) },
	} {
		path := filepath.Join(t.TempDir(), "reservations")
		require.NoError(t, make(path))
		if want == "far too large" {
			require.NoError(t, os.Truncate(path, maxReservations+1))
		}
		_, err := NewReservationFile(path).Load()
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, path)
	}
	_, err := NewReservationFile(t.TempDir()).Load()
	require.ErrorContains(t, err, "not a regular file")
	_, err = NewReservationFile("/proc/version/reservations").Load()
	require.True(t, errors.Is(err, unix.ENOTDIR), "%v", err)
}
