package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

func TestMounts(t *testing.T) {
	dir := t.TempDir()
	claim, other, cache := filepath.Join(dir, "a claim"), filepath.Join(dir, "other"),
		filepath.Join(dir, "cache")
	for _, d := range []string{claim, other, cache} {
		require.NoError(t, os.Mkdir(d, 0o700))
	}
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	line := func(path, options, kind string) string {
		return fmt.Sprintf("31 22 8:1 / %s %s shared:1 - %s /dev/sda1 rw\n",
			strings.ReplaceAll(path, " ", `\040`), options, kind)
	}
	mounts := line("/", "rw", "overlay") + line("/dev/shm", "rw", "ext4") +
		line(other, "ro,relatime", "ext4") + line(file, "rw", "ext4") +
		line(cache+"/x", "rw", "ext4") + line(cache, "rw", "ext4") + line(other, "rw", "tmpfs") +
		"garbage\n" + line(claim, "rw,relatime", "ext4")
	in := func(text string, own ...string) []string {
		return testtool.Must(mountsIn(strings.NewReader(text), own))(t)
	}
	require.Equal(t, []string{claim}, in(mounts, cache))
	require.Equal(t, []string{cache, claim}, in(mounts))

	// A volume that gives errors may be the claim.
	broken := filepath.Join(dir, "broken")
	require.NoError(t, os.Symlink(broken, broken)) // ELOOP
	require.Equal(t, []string{broken}, in(line(broken, "rw", "nfs4")+line(dir+"/no", "rw", "ext4")))
}

// TestMountsThatCannotBeListed: an error does not mean that no claim is mounted.
func TestMountsThatCannotBeListed(t *testing.T) {
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	_, err := Mounts(nil)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.ErrorIs(t, err, unix.EMFILE)
	_, err = mountsIn(iotest.ErrReader(unix.ENOMEM), nil)
	require.ErrorIs(t, err, unix.ENOMEM)
}
