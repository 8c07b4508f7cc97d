package disk_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
)

// Every disk that is laid over an image passes the suite of all disks, in each mode, ephemeral and persistent, while it is
// copied in the background.
func TestSuiteOverAnImage(t *testing.T) {
	dir := t.TempDir()
	content := make([]byte, 10<<20+512) // ends within a block
	r := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(content); i += 1 << 20 {
		for j := range content[i:min(i+700<<10, len(content))] {
			content[i+j] = byte(r.Uint32())
		}
	}
	path := filepath.Join(dir, "disk.raw")
	require.NoError(t, os.WriteFile(path, content, 0o644))
	for _, mode := range []disk.CopyMode{disk.CopyOnWrite, disk.CopyOnRead, disk.CopyClone} {
		for name, opt := range map[string]disk.OpenOptions{
			"ephemeral":  {},
			"larger":     {Size: 16 << 20},
			"flushed":    {Durable: true},
			"persistent": {PersistentDir: "set below"},
		} {
			t.Run(string(mode)+"/"+name, func(t *testing.T) {
				disktest.Run(t, func(t *testing.T) disk.Disk {
					img, err := disk.OpenImage(path, disk.ImageOptions{})
					require.NoError(t, err)
					opt := opt
					opt.Mode, opt.WorkDir = mode, t.TempDir()
					if opt.PersistentDir != "" {
						opt.PersistentDir = t.TempDir()
					}
					inst, err := disk.Open(t.Context(), img, opt)
					require.NoError(t, err)
					t.Cleanup(func() { require.NoError(t, inst.Close()) })
					return inst.Disk
				})
			})
		}
	}
}
