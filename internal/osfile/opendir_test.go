package osfile

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestOpenDir: no part of a path may be a link.
func TestOpenDir(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	require.NoError(t, os.MkdirAll("a/b", 0o700))
	filetest.Put(t, dir, "a/file", []byte("x"), 0)
	require.NoError(t, os.Symlink("b", "a/link"))
	require.NoError(t, os.Symlink("a", "link"))
	for path, want := range map[string]error{"a/b": nil, "./a/b/": nil, ".": nil, "/": nil,
		dir + "/a": nil, "a/none": unix.ENOENT, "a/file": unix.ENOTDIR,
		"a/link": unix.ELOOP, "link": unix.ELOOP, "link/b": unix.ELOOP, dir + "/link/b": unix.ELOOP,
		"a/link/..": unix.ELOOP, "a/b/..": nil} {
		fd, err := openDir(path)
		require.ErrorIs(t, err, want, path)
		if err == nil {
			require.NoError(t, unix.Close(fd))
		}
	}
}
