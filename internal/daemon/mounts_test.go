package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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
	require.Equal(t, []string{claim}, mountsIn(strings.NewReader(mounts), []string{cache}))
	require.Equal(t, []string{cache, claim}, mountsIn(strings.NewReader(mounts), nil))
}
