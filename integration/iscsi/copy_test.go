package iscsi

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestCopyOffload makes QEMU copy one LUN to another with EXTENDED COPY. No block goes through the
// client, and unallocated blocks stay unallocated.
func TestCopyOffload(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", rig.QEMUISCSI)
	dir, state := t.TempDir(), t.TempDir()
	const size, used = 64 << 20, 24 << 20
	rig.MakeRaw(t, filepath.Join(dir, "a.raw"), used)
	require.NoError(t, os.Truncate(filepath.Join(dir, "a.raw"), size))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.raw"),
		bytes.Repeat([]byte("old data"), 16<<20/8), 0o644))
	require.NoError(t, os.Truncate(filepath.Join(dir, "b.raw"), size))
	d := rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
	rig.OK(t, "qemu-img", "convert", "-C", "-n", "-f", "raw", "-O", "raw", d.URL(1), d.URL(2))
	require.Zero(t, d.Operations("read"), "the target must copy by itself")
	rig.Same(t, d.URL(1), d.URL(2))
	rig.Same(t, filepath.Join(dir, "a.raw"), d.URL(2))
	d.Stop()

	allocated := int64(0)
	require.NoError(t, filepath.WalkDir(state, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			allocated += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	}))
	require.Less(t, allocated, int64(8<<20), "bytes of both disks: the destination must free "+
		"what the source does not use")
}
