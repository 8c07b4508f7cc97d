package osfile

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// TestCallBesideClose checks that a descriptor stays ours until the call on it has ended. Otherwise
// a hole could be punched into a file that has just got the same descriptor.
func TestCallBesideClose(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	closed := make(chan error, 1)
	require.NoError(t, Call(f, func(fd int) error {
		go func() { closed <- f.Close() }()
		testtool.Eventually(t, func() bool {
			return Call(f, func(int) error { return nil }) != nil
		})
		_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		return err
	}))
	require.NoError(t, <-closed)
	require.ErrorIs(t, Call(f, func(int) error { return nil }), os.ErrClosed)
}
