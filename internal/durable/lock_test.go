package durable

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
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

// TestAcquireDiskLock: who does not empty the lock file at the end counts as killed, also if there
// was no space for what the file says.
func TestAcquireDiskLock(t *testing.T) {
	path := filepath.Join(filetest.TinyFS(t, "256k"), LockName)
	for _, c := range []struct{ killed, empties, full bool }{{empties: true}, {full: true},
		{killed: true}, {killed: true, empties: true}, {}} {
		if c.full {
			filetest.Fill(t, filepath.Dir(path))
		}
		f, killed, err := AcquireDiskLock(path, "the disk")
		require.NoError(t, err)
		require.Equal(t, c.killed, killed)
		if c.empties {
			require.NoError(t, f.Truncate(0))
		}
		require.NoError(t, ReleaseLock(f))
	}
}
