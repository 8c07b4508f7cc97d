package instance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// TestFilesThatAreTooLarge: the largest file of a file system has nothing to do with its free
// space.
func TestFilesThatAreTooLarge(t *testing.T) {
	const size = 40 << 40
	dir, work := t.TempDir(), t.TempDir()
	if err := os.Truncate(filetest.Put(t, dir, "probe", nil, 0), size); !errors.Is(err,
		unix.EFBIG) {
		require.NoError(t, err)
		t.Skip("needs a file system with a limit of less than 40 TiB for a file, as ext4")
	}
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "large.qcow2", fmt.Sprint(size))
	img := openGood(t, filepath.Join(dir, "large.qcow2"))
	small := filetest.Put(t, dir, "small.raw", filetest.Block(1, 8192), 0)
	kept, _ := start(t, small, Options{WorkDir: work})
	require.NoError(t, kept.Close())
	open := func(img *image.Image, opt Options) error {
		_, err := Open(t.Context(), img, opt)
		return err
	}
	for name, err := range map[string]error{
		"convert":   image.Convert(t.Context(), img, filepath.Join(dir, "out.raw"), true, nil),
		"ephemeral": open(img, Options{WorkDir: work}),
		"persistent": open(img,
			Options{PersistentDir: filepath.Join(dir, "volume"), Mode: CopyOnWrite}),
		"grown later": open(openGood(t, small), Options{WorkDir: work, Size: size}),
		"larger at first": open(openGood(t, small),
			Options{PersistentDir: filepath.Join(dir, "other"), Size: size}),
	} {
		t.Run(name, func(t *testing.T) {
			var space *image.SpaceError
			require.ErrorAs(t, err, &space)
			require.EqualValues(t, size, space.FileSize)
			for _, part := range []string{"40 TiB (43980465111040 bytes)", space.Dir,
				"another file system"} {
				require.ErrorContains(t, err, part)
			}
			require.NotContains(t, err.Error(), "filled up")
		})
	}
	again, _ := start(t, small, Options{WorkDir: work})
	require.True(t, again.kept, "the disk is as it was")
	require.False(t, again.Grown)
}

// TestDisksThatAreTooLarge: some file systems have files of exabytes. A disk of that size would
// take more memory than there is.
func TestDisksThatAreTooLarge(t *testing.T) {
	const size = 1 << 60
	opt := Options{PersistentDir: filetest.TinyFS(t, "8m"), Size: size, Empty: true}
	open := func() (*Instance, error) { return Open(t.Context(), nil, opt) }
	require.ErrorContains(t, testtool.Err(open()), "that a disk can have")
	require.Empty(t, filetest.Names(t, opt.PersistentDir))
	opt.Size = 1 << 20
	inst := testtool.Must(open())(t)
	require.ErrorAs(t, inst.Grow(size), new(*SizeError))
	require.NoError(t, inst.Grow(2<<20))
	require.NoError(t, inst.Close())
	require.NoError(t, os.Truncate(inst.path, size), "somebody has enlarged it")
	opt.Size = 0
	require.ErrorContains(t, testtool.Err(open()), "(64 TiB) that a disk can have")
}

// TestCancelledStartLeavesNothing: a cancelled start leaves no disk.
func TestCancelledStartLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	img := openGood(t, filetest.Put(t, dir, "disk.raw", filetest.Sample(8<<20, 3), 0))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Open(ctx, img, Options{WorkDir: filepath.Join(dir, "work")})
	require.ErrorIs(t, err, context.Canceled)
	for _, pattern := range []string{"work/*/disk*", "work/*/state*"} {
		require.Empty(t, testtool.Must(filepath.Glob(filepath.Join(dir, pattern)))(t))
	}
}
