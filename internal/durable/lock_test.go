package durable

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestReleaseLock: a lock that is released can be had at once, although a process that is just
// being started still has a copy of the open file.
func TestReleaseLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), LockName)
	f, err := AcquireLock(path, "the directory")
	require.NoError(t, err)
	copied, err := unix.Dup(int(f.Fd()))
	require.NoError(t, err)
	defer unix.Close(copied)
	var locked *LockedError
	_, err = AcquireLock(path, "the directory")
	require.ErrorAs(t, err, &locked)
	require.NoError(t, ReleaseLock(f))
	f, err = AcquireLock(path, "the directory")
	require.NoError(t, err)
	require.NoError(t, ReleaseLock(f))
}
