package instance_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/testtool"
)

// TestEmpty: a disk that is made of nothing reads as zeros, and is the same one later.
func TestEmpty(t *testing.T) {
	dir := t.TempDir()
	opt := instance.Options{Name: "vm1", PersistentDir: dir, Empty: true}
	require.ErrorAs(t, testtool.Err(instance.Open(t.Context(), nil, opt)), new(*instance.SizeError))
	opt.Size = 4 << 20
	inst := testtool.Must(instance.Open(t.Context(), nil, opt))(t)
	require.Equal(t, int64(4<<20), inst.Size())
	got := filetest.Read(t, inst, 0, 4<<20)
	require.Equal(t, make([]byte, 4<<20), got)
	filetest.Write(t, inst, []byte("written"), 512)
	require.NoError(t, inst.Close())

	again := testtool.Must(instance.Open(t.Context(), nil, instance.Options{PersistentDir: dir}))(t)
	require.Equal(t, inst.Identity, again.Identity)
	_, err := again.ReadAt(t.Context(), got[:7], 512)
	require.NoError(t, err)
	require.Equal(t, "written", string(got[:7]))
	require.NoError(t, again.Close())
	// An empty disk that is lost is not made again either.
	require.NoError(t, os.Remove(filepath.Join(dir, instance.PersistentName)))
	for _, opt := range []instance.Options{{PersistentDir: dir}, opt} {
		_, err = instance.Open(t.Context(), nil, opt)
		require.ErrorContains(t, err, "is missing, and was there at an earlier start")
	}

	disktest.Run(t, func(t *testing.T) disk.Disk {
		inst := testtool.Must(instance.Open(t.Context(), nil, instance.Options{Empty: true,
			PersistentDir: t.TempDir(), Size: 8 << 20}))(t)
		t.Cleanup(func() { require.NoError(t, inst.Close()) })
		return inst.Disk
	})
}

// TestGrow: a disk grows while it is being copied and used, and has its size after a restart. The
// image ends within a block, which then has a new part.
func TestGrow(t *testing.T) {
	const size = 8<<20 + 512
	path := filepath.Join(t.TempDir(), "image.raw")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{7}, size), 0o600))
	for _, mode := range []instance.CopyMode{instance.CopyClone, instance.CopyOnRead,
		instance.CopyOnWrite} {
		t.Run(string(mode), func(t *testing.T) {
			dir := t.TempDir()
			open := func() *instance.Instance {
				img := testtool.Must(image.Open(path, image.Options{}))(t)
				inst := testtool.Must(instance.Open(t.Context(), img, instance.Options{Mode: mode,
					PersistentDir: dir}))(t)
				return inst
			}
			inst := open()
			require.NoError(t, inst.Grow(size+512))
			filetest.Write(t, inst, bytes.Repeat([]byte{9}, 512), size)
			require.NoError(t, inst.Grow(32<<20))
			require.NoError(t, inst.Grow(32<<20))
			require.ErrorAs(t, inst.Grow(size), new(*instance.SizeError))
			require.ErrorAs(t, inst.Grow(32<<20+1), new(*instance.SizeError))
			filetest.Write(t, inst, bytes.Repeat([]byte{8}, 4096), 32<<20-4096)
			require.NoError(t, inst.Flush())
			for range 2 {
				require.Equal(t, int64(32<<20), inst.Size())
				got := filetest.Read(t, inst, 0, 32<<20)
				want := make([]byte, 32<<20)
				copy(want, bytes.Repeat([]byte{7}, size))
				copy(want[size:], bytes.Repeat([]byte{9}, 512))
				copy(want[32<<20-4096:], bytes.Repeat([]byte{8}, 4096))
				require.True(t, bytes.Equal(want, got))
				require.NoError(t, inst.Close())
				inst = open()
			}
			require.NoError(t, inst.Close())
		})
	}
}
