package instance_test

import (
	"bytes"
	"math/rand/v2"
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

// TestSuiteOverAnImage runs the suite of all disks over an image in each mode, ephemeral and
// persistent, while the image is copied in the background.
func TestSuiteOverAnImage(t *testing.T) {
	dir := t.TempDir()
	content := make([]byte, 3<<20+512) // ends within a block
	r := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(content); i += 1 << 20 {
		for j := range content[i:min(i+700<<10, len(content))] {
			content[i+j] = byte(r.Uint32())
		}
	}
	path := filepath.Join(dir, "disk.raw")
	require.NoError(t, os.WriteFile(path, content, 0o644))
	for _, mode := range []instance.CopyMode{instance.CopyOnWrite, instance.CopyOnRead,
		instance.CopyClone} {
		for name, opt := range map[string]instance.Options{
			"ephemeral":  {},
			"larger":     {Size: 5 << 20},
			"flushed":    {Durable: true},
			"persistent": {PersistentDir: "set below"},
		} {
			t.Run(string(mode)+"/"+name, func(t *testing.T) {
				disktest.Run(t, func(t *testing.T) disk.Disk {
					img := testtool.Must(image.Open(path, image.Options{}))(t)
					opt := opt
					opt.Mode, opt.WorkDir = mode, t.TempDir()
					if opt.PersistentDir != "" {
						opt.PersistentDir = t.TempDir()
					}
					inst := testtool.Must(instance.Open(t.Context(), img, opt))(t)
					t.Cleanup(func() { require.NoError(t, inst.Close()) })
					return inst.Disk
				})
			})
		}
	}
}

// TestSlowReads: a range that must be decompressed says so until it is decoded or copied.
func TestSlowReads(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "a.raw")
	require.NoError(t, os.WriteFile(raw, bytes.Repeat([]byte("some text "), 1<<17), 0o644))
	path := filepath.Join(dir, "b.qcow2")
	filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", "qcow2", "-c", raw, path)
	img := testtool.Must(image.Open(path, image.Options{}))(t)
	inst, err := instance.Open(t.Context(), img,
		instance.Options{WorkDir: t.TempDir(), Mode: instance.CopyOnWrite,
			BlockSizeKnown: true}) // so it is not looked at before
	require.NoError(t, err)
	defer inst.Close()
	slow := inst.Disk.(disk.Estimator).Slow
	_, err = inst.ReadAt(t.Context(), make([]byte, 4096), 1<<20) // the tables are in memory now
	require.NoError(t, err)
	require.True(t, slow(0))
	require.True(t, slow(256<<10))
	require.NoError(t, testtool.Err(inst.ReadAt(t.Context(), make([]byte, 4096), 0)))
	require.False(t, slow(32<<10), "the cluster is in memory")
	require.NoError(t, testtool.Err(inst.WriteAt(t.Context(), make([]byte, 4096), 256<<10)))
	require.False(t, slow(256<<10), "it was written")
}
