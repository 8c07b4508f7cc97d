package kubevirt

import (
	"os"
	"testing"

	"kubevirt.io/disk/internal/testtool"
)

// everyday are the scenarios of all targets, on a machine where a whole KubeVirt was built. The
// others run in `make test-kubevirt` and `make test-nightly`.
var everyday = map[string]bool{"throwaway": true, "stays": true, "streamed": true}

// TestKubeVirt runs what people do with disks of ours in KubeVirt. With an older launcher run, too,
// those scenarios in which libvirt or QEMU can differ: how a disk gets into a domain, and what
// becomes of its connection. KUBEVIRT_DISK_EARLIER asks for all of them with that one alone.
func TestKubeVirt(t *testing.T) {
	c := start(t)
	clusters := []*cluster{c, c.older(t, earlier)}
	if os.Getenv("KUBEVIRT_DISK_EARLIER") != "" {
		clusters = clusters[1:]
	}
	t.Run("scenarios", func(t *testing.T) {
		// Go begins with the first, and goes on with the last and backwards: those take long.
		for _, one := range []struct {
			name     string
			scenario func(*cluster, *testing.T)
			differ   bool // if libvirt or QEMU do
		}{
			{name: "throwaway", scenario: (*cluster).throwaway, differ: true},
			{name: "streamed", scenario: (*cluster).streamed},
			{name: "existing", scenario: (*cluster).existing},
			{name: "filled", scenario: (*cluster).filled},
			{name: "replaced", scenario: (*cluster).replaced, differ: true},
			{name: "identity", scenario: (*cluster).identity},
			{name: "hotplug", scenario: (*cluster).hotplug},
			{name: "ended", scenario: (*cluster).ended},
			{name: "copied", scenario: (*cluster).copied},
			{name: "stays", scenario: (*cluster).stays},
			{name: "refused", scenario: (*cluster).refused},
			{name: "guaranteed", scenario: (*cluster).guaranteed},
			{name: "upgraded", scenario: (*cluster).upgraded},
			{name: "killed", scenario: (*cluster).killed, differ: true},
			{name: "moves", scenario: (*cluster).moves},
		} {
			for i, c := range clusters {
				name := one.name
				if i > 0 {
					if !one.differ {
						break
					}
					name += " with " + earlier
				}
				t.Run(name, func(t *testing.T) {
					if !everyday[name] {
						testtool.NeedNightly(t)
					}
					t.Parallel()
					one.scenario(c, t)
				})
			}
		}
	})
}
