package durable

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

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
