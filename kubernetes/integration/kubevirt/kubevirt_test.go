package kubevirt

import (
	"testing"

	"kubevirt.io/disk/internal/testtool"
)

// everyday are the scenarios of all targets, on a machine where a whole KubeVirt was built. The
// others run in `make test-kubevirt` and `make test-nightly`.
var everyday = map[string]bool{"throwaway": true, "stays": true, "streamed": true}

// TestKubeVirt runs what people do with disks of ours in KubeVirt. With an older launcher run, too,
// those scenarios in which libvirt or QEMU can differ: how a disk gets into a domain, and what
// becomes of its connection.
func TestKubeVirt(t *testing.T) {
	c := start(t)
	old := c.older(t, earlier)
	t.Run("scenarios", func(t *testing.T) {
		for _, one := range []struct { // those that take long come first
			name     string
			scenario func(*testing.T)
		}{
			{"guaranteed", c.guaranteed},
			{"throwaway", c.throwaway},
			{"throwaway with " + earlier, old.throwaway},
			{"moves", c.moves},
			{"upgraded", c.upgraded},
			{"stays", c.stays},
			{"refused", c.refused},
			{"killed", c.killed},
			{"killed with " + earlier, old.killed},
			{"ended", c.ended},
			{"identity", c.identity},
			{"replaced", c.replaced},
			{"replaced with " + earlier, old.replaced},
			{"hotplug", c.hotplug},
			{"copied", c.copied},
			{"filled", c.filled},
			{"existing", c.existing},
			{"streamed", c.streamed},
		} {
			t.Run(one.name, func(t *testing.T) {
				if !everyday[one.name] {
					testtool.NeedNightly(t)
				}
				t.Parallel()
				one.scenario(t)
			})
		}
	})
}
