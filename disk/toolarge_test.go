package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// What a file system admits as the size of a file has nothing to do with how much space is left.
func TestFilesThatAreTooLarge(t *testing.T) {
	const size = 40 << 40
	dir, work := t.TempDir(), t.TempDir()
	if err := os.Truncate(put(t, dir, "probe", nil, 0), size); !errors.Is(err, unix.EFBIG) {
		require.NoError(t, err)
		t.Skip("needs a file system with a limit of less than 40 TiB for a file, as ext4")
	}
	qemuImg(t, dir, "create", "-q", "-f", "qcow2", "large.qcow2", fmt.Sprint(size))
	img := openGood(t, filepath.Join(dir, "large.qcow2"))
	small := put(t, dir, "small.raw", block(1, 8192), 0)
	kept, _ := start(t, small, OpenOptions{WorkDir: work})
	require.NoError(t, kept.Close())
	open := func(img *Image, opt OpenOptions) error {
		_, err := Open(t.Context(), img, opt)
		return err
	}
	for name, err := range map[string]error{
		"convert":         Convert(t.Context(), img, filepath.Join(dir, "out.raw"), nil),
		"ephemeral":       open(img, OpenOptions{WorkDir: work}),
		"persistent":      open(img, OpenOptions{PersistentDir: filepath.Join(dir, "volume"), Mode: CopyOnWrite}),
		"grown later":     open(openGood(t, small), OpenOptions{WorkDir: work, Size: size}),
		"larger at first": open(openGood(t, small), OpenOptions{PersistentDir: filepath.Join(dir, "other"), Size: size}),
	} {
		t.Run(name, func(t *testing.T) {
			var space *SpaceError
			require.ErrorAs(t, err, &space)
			require.EqualValues(t, size, space.FileSize)
			for _, part := range []string{"40 TiB (43980465111040 bytes)", space.Dir, "another file system"} {
				require.ErrorContains(t, err, part)
			}
			require.NotContains(t, err.Error(), "filled up")
		})
	}
	again, _ := start(t, small, OpenOptions{WorkDir: work})
	require.True(t, again.Kept, "the disk is as it was")
	require.False(t, again.Grown)
}

// A clone that cannot fit is refused before anything is made.
func TestCloneThatDoesNotFit(t *testing.T) {
	small := tinyFS(t, "1m")
	img := openGood(t, put(t, t.TempDir(), "disk.raw", block(5, 3<<20), 0))
	_, err := Open(t.Context(), img, OpenOptions{WorkDir: small})
	var space *SpaceError
	require.ErrorAs(t, err, &space)
	entries, err := os.ReadDir(small)
	require.NoError(t, err)
	require.Len(t, entries, 1, "only the directory with the lock")
}

// A start that is stopped leaves no disk.
func TestCancelledStartLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	img := openGood(t, put(t, dir, "disk.raw", sample(8<<20, 3), 0))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Open(ctx, img, OpenOptions{WorkDir: filepath.Join(dir, "work")})
	require.ErrorIs(t, err, context.Canceled)
	for _, pattern := range []string{"work/*/disk*", "work/*/state*"} {
		left, err := filepath.Glob(filepath.Join(dir, pattern))
		require.NoError(t, err)
		require.Empty(t, left)
	}
}
