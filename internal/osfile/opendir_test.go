package osfile

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestOpenDir checks that the fallback for systems without openat2 gives the same answers.
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
		for _, open := range []func(string) (int, error){openDir, walkDir} {
			fd, err := open(path)
			if want == nil {
				require.NoError(t, err, path)
				require.NoError(t, unix.Close(fd))
			} else {
				require.True(t, errors.Is(err, want), "%s: %v", path, err)
			}
		}
	}
}
