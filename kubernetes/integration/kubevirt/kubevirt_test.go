package kubevirt

import "testing"

// TestKubeVirt runs what people do with disks of ours in KubeVirt.
func TestKubeVirt(t *testing.T) {
	c := start(t)
	t.Run("scenarios", func(t *testing.T) {
		for _, one := range []struct { // those that take long come first
			name     string
			scenario func(*testing.T)
		}{
			{"guaranteed", c.guaranteed},
			{"throwaway", c.throwaway},
			{"stays", c.stays},
			{"killed", c.killed},
			{"ended", c.ended},
			{"identity", c.identity},
			{"replaced", c.replaced},
			{"hotplug", c.hotplug},
			{"copied", c.copied},
			{"streamed", c.streamed},
		} {
			t.Run(one.name, func(t *testing.T) {
				t.Parallel()
				one.scenario(t)
			})
		}
	})
}
