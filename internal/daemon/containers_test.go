package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

// TestAnotherConfiguration: with other options the disk of a container image keeps what the guest
// wrote, and the guest finds the configuration of this start, in every copy mode.
func TestAnotherConfiguration(t *testing.T) {
	const written = 1 << 30 // where the guest writes
	for _, mode := range []instance.CopyMode{instance.CopyClone, instance.CopyOnRead,
		instance.CopyOnWrite} {
		for _, persistent := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%t", mode, persistent), func(t *testing.T) {
				opt := testOptions(t)
				opt.Containers.References = []transport.Reference{optionstest.SavedImage(t)}
				opt.Streams.CacheDir = filepath.Join(filepath.Dir(opt.WorkDir), "cache")
				opt.Streams.CacheSize = 1 << 30
				opt.Containers.Dir = filepath.Join(opt.Streams.CacheDir, "levels")
				opt.Settings.Disk.CopyMode = mode
				opt.WorkDirNamed = true
				opt.RecordBoot = filepath.Join(filepath.Dir(opt.WorkDir), "order")
				if persistent {
					opt.PersistentDir = filepath.Join(filepath.Dir(opt.WorkDir), "volume")
				}
				serial := ""
				for i, env := range []string{"A=1", "A=a longer value", "A=1", ""} {
					opt.Containers.Machine.Env = nil
					if env != "" {
						opt.Containers.Machine.Env = []string{env}
					}
					r := start(t, opt)
					s := r.disks.Served()[0]
					inst := s.Instance()
					mine := make([]byte, 4)
					var err error
					if i == 0 {
						mine := append([]byte("mine"), make([]byte, 508)...)
						require.NoError(t, testtool.Err(inst.WriteAt(t.Context(), mine, written)))
						serial = inst.Identity.Serial
					}
					require.NoError(t, testtool.Err(inst.ReadAt(t.Context(), mine, written)))
					require.Equal(t, "mine", string(mine), "start %d", i)
					config := make([]byte, 4096)
					_, err = inst.ReadAt(t.Context(), config, machine.ConfigOffset)
					require.NoError(t, err)
					text := strings.TrimRight(string(config), "\x00")
					if env == "" {
						require.NotContains(t, text, "extra")
					} else {
						require.True(t, strings.HasSuffix(text, `"extra":{"env":["`+env+`"]}}`),
							"start %d: %s", i, text)
					}
					require.Equal(t, serial, inst.Identity.Serial)
					if mode == instance.CopyClone {
						testtool.Eventually(t, s.Progress.Finished, "the copy is complete")
					}
					require.NoError(t, r.end())
					if i > 0 && mode == instance.CopyClone {
						continue // the image is not read any more
					}
					// What the daemon itself has read to compare the configuration is no guest's.
					f := testtool.Must(os.Open(opt.RecordBoot))(t)
					order := testtool.Must(registry.ReadBootOrder(f))(t)
					require.NoError(t, f.Close())
					require.NoError(t, os.Remove(opt.RecordBoot))
					require.EqualValues(t, written/registry.BootBlock,
						order.Disks[0].Blocks[0].First)
				}
			})
		}
	}
}
