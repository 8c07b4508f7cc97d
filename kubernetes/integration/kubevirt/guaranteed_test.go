package kubevirt

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// guaranteed are machines with guaranteed QoS: KubeVirt limits their hook sidecars to 64 MB of
// memory and 200m of a processor, and nobody is killed for want of memory: with an image, with one
// that is streamed, with a claim, and with two disks.
func (c *cluster) guaranteed(t *testing.T) {
	const resources = `    resources:
      requests: {cpu: "1", memory: 128Mi}
      limits: {cpu: "1", memory: 128Mi}
`
	c.volume(t, "sure-data", "ReadWriteOnce")
	c.Apply(t, claim("sure-data"))
	claimed := `{"image": "` + guestImage + `", "pvc": {"name": "sure-data", "volumePath": "/data"}}`
	for _, kind := range []struct {
		name, sidecars string
		disks          int
	}{
		{"sure-two", ownImage + ", " + claimed, 2},
		{"sure-streamed", c.streams(), 1},
	} {
		t.Run(kind.name, func(t *testing.T) {
			c.Apply(t, c.instance(kind.name, kind.sidecars, resources))
			m := c.running(t, kind.name)
			require.EqualValues(t, "Guaranteed", m.pod.Status.QOSClass)
			for i := range kind.disks {
				device := "/dev/vd" + string(rune('a'+i))
				require.Equal(t, c.imageSum(t), m.sum(device))
				m.copies(device, 800, 128)
				m.limits("hook-sidecar-" + strconv.Itoa(i))
			}
			m.delete("vmi") // both containers end with 0, so none was killed
		})
	}
}

// claim is a claim of the default class.
func claim(name string) string {
	return `{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: ` + name + `}, ` +
		`spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}`
}

// limits tells what a container has used, and compares its limit with KubeVirt's.
func (m *machine) limits(container string) {
	m.t.Helper()
	found := testtool.Must(filepath.Glob("/sys/fs/cgroup/memory/kubevirt-disk*/kubepods/pod*/" +
		m.container(container)))(m.t)
	if len(found) == 0 {
		return // cgroups of version 2
	}
	read := func(name string) string {
		data := testtool.Must(os.ReadFile(filepath.Join(found[0], name)))(m.t)
		return strings.TrimSpace(string(data))
	}
	require.Equal(m.t, "64000000", read("memory.limit_in_bytes"))
	require.Contains(m.t, read("memory.oom_control"), "oom_kill 0")
	most := testtool.Must(strconv.Atoi(read("memory.max_usage_in_bytes")))(m.t)
	m.t.Logf("%s of %s has used at most %d MiB, with its page cache", container, m.name, most>>20)
}
