package kubevirt

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// moves is a machine whose disk has a server of its own. It writes all the time, and moves between
// the nodes: by a migration, by an eviction, while the server is killed, and while it is away. No
// write is lost.
func (c *cluster) moves(t *testing.T) {
	const name = "moves"
	dir := c.volume(t, v1alpha1.ClaimName(name), "ReadWriteOncePod")
	c.Apply(t, c.movable(t))
	m := c.running(t, name)
	server := m.server()
	m.write("/dev/vda")
	m.migrate("moves-1", func() {})
	m.writes(10)
	m.evict()
	m.writes(10)
	m.migrate("moves-killed", func() {
		m.inMigration("moves-killed")
		m.killServer()
	})
	m.writes(10)
	m.migrate("moves-away", func() {
		m.inMigration("moves-away")
		c.Kubectl(t, "scale", server, "--replicas=0")
		c.Kubectl(t, "wait", "pods", "-l", c.selector(t, server), "--for=delete", "--timeout=5m")
		c.Kubectl(t, "scale", server, "--replicas=1")
	})
	m.writes(10)
	written := m.found("/dev/vda")
	m.delete("vm")
	kept(t, dir, written)
}

// movable is the example of a machine that moves. For the earlier QEMU, its processor has no
// feature that the later one does not emulate, and is limited: QEMU 7.2 can mix up the connections
// of a migration with several, which KubeVirt makes if it is not.
func (c *cluster) movable(t *testing.T) string {
	t.Helper()
	const earlier = "domain:\n        cpu: {features: [{name: pcommit, policy: disable}]}\n" +
		"        resources: {requests: {cpu: 100m}, limits: {cpu: 2}}\n"
	manifest := c.withDigest(c.manifest(t, "moves.yaml"))
	if c.qemu != earlierQEMU {
		return manifest
	}
	return strings.Replace(manifest, "domain:\n", earlier, 1)
}

// upgraded is a machine whose disk has a server of its own, and whose launcher is of an earlier
// Debian. It moves to another such launcher, while the server is killed, and by an eviction to one
// of the Debian that KubeVirt was installed with, as after its update. No write is lost.
func (c *cluster) upgraded(t *testing.T) {
	c = c.older(t, "upgraded")
	dir := c.volume(t, v1alpha1.ClaimName("moves"), "ReadWriteOncePod")
	c.Apply(t, c.movable(t))
	m := c.running(t, "moves")
	require.Equal(t, earlierQEMU, m.qemu())
	m.write("/dev/vda")
	m.migrate("older", func() {
		m.inMigration("older")
		m.killServer()
	})
	require.Equal(t, earlierQEMU, m.qemu())
	m.writes(10)
	c.Kubectl(t, "label", "namespace", "upgraded", "launcher-")
	m.evict()
	require.Equal(t, "10.0", m.qemu())
	m.writes(10)
	written := m.found("/dev/vda")
	m.delete("vm")
	kept(t, dir, written)
}

// killServer kills the server of the machine's disk.
func (m *machine) killServer() {
	m.t.Helper()
	id := strings.Fields(m.c.Kubectl(m.t, "get", "pods", "-l", m.c.selector(m.t, m.server()), "-o",
		"jsonpath={.items[0].spec.nodeName} {.items[0].status.containerStatuses[0].containerID}"))
	m.c.at(id[0]).Kill(m.t, id[1])
}

// server is the Deployment of a disk that has a server of its own.
func (m *machine) server() string { return "deployment/" + v1alpha1.ClaimName(m.name) }

// selector selects the pods of a Deployment.
func (c *cluster) selector(t *testing.T, deployment string) string {
	t.Helper()
	labels := c.Kubectl(t, "get", deployment, "-o",
		`go-template={{range $k, $v := .spec.selector.matchLabels}}{{$k}}={{$v}},{{end}}`)
	return strings.TrimSuffix(labels, ",")
}

// inMigration waits until the guest's memory moves.
func (m *machine) inMigration(name string) {
	m.t.Helper()
	m.c.until(m.t, name+" runs", func() bool {
		phase := m.phase(name)
		require.NotEqual(m.t, "Failed", phase)
		return phase == "Running" || phase == "Succeeded"
	})
}

// evacuation begins the names of migrations that KubeVirt makes for evictions.
const evacuation = "kubevirt-evacuation-"

// phase is that of a migration. KubeVirt's handler of a node may keep its connection to a launcher
// that has ended, if that ends while it is told to, and then waits for it in the next migration to
// the node: see docs/kubevirt.md. That migration is made to fail, and is made again.
func (m *machine) phase(name string) string {
	m.t.Helper()
	phase := func() string {
		return m.c.Kubectl(m.t, "get", "vmim", name, "-o", "jsonpath={.status.phase}")
	}
	is := phase()
	if is != "PreparingTarget" || m.unresponsive()-m.waits < 10 {
		return is
	}
	m.t.Logf("KubeVirt waits for the former launcher of %s: %s ends", m.name, name)
	m.c.Kubectl(m.t, "delete", "pods", "--wait=false", "-l", "kubevirt.io/migrationJobUID="+
		m.c.Kubectl(m.t, "get", "vmim", name, "-o", "jsonpath={.metadata.uid}"))
	m.c.until(m.t, name+" has failed", func() bool { return phase() == "Failed" })
	m.waits = m.unresponsive()
	if strings.HasPrefix(name, evacuation) {
		return "Failed" // KubeVirt makes the next one
	}
	m.c.Kubectl(m.t, "delete", "vmim", name)
	m.c.Apply(m.t, migration(name, m.name))
	return "Pending"
}

// unresponsive is how often KubeVirt has said that a launcher of the machine does not answer, about
// once a second.
func (m *machine) unresponsive() (times int) {
	m.t.Helper()
	for said := range strings.SplitSeq(m.c.Kubectl(m.t, "get", "events", "--field-selector",
		"reason=SyncFailed,involvedObject.name="+m.name, "-o",
		`jsonpath={range .items[*]}{.count} {.message}{"\n"}{end}`), "\n") {
		count, message, _ := strings.Cut(said, " ")
		if strings.Contains(message, "unresponsive command server") {
			times += testtool.Must(strconv.Atoi(count))(m.t)
		}
	}
	return times
}

// evict evicts the machine's pod, as a drain does. KubeVirt moves the machine instead.
func (m *machine) evict() {
	m.t.Helper()
	began, from := time.Now(), m.pod
	out, err := m.c.TryKubectl(`{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": `+
		`{"name": "`+from.Name+`"}}`, "create", "--raw", "/api/v1/namespaces/"+
		m.c.namespace+"/pods/"+from.Name+"/eviction", "-f", "-")
	require.Error(m.t, err, "the pod stays until the machine has moved")
	require.Contains(m.t, out, "evacuation")
	m.c.until(m.t, m.name+" has moved", func() bool {
		for name := range strings.FieldsSeq(m.c.Kubectl(m.t, "get", "vmim", "-o",
			`jsonpath={.items[?(@.status.phase=="PreparingTarget")].metadata.name}`)) {
			if strings.HasPrefix(name, evacuation) && m.phase(name) == "Failed" {
				return false
			}
		}
		state := m.c.Kubectl(m.t, "get", "vmi", m.name, "-o", "jsonpath={.status.nodeName} "+
			"{.status.migrationState.sourcePod} {.status.migrationState.completed} "+
			"{.status.migrationState.failed}")
		words := strings.Fields(state)
		if len(words) < 3 || words[1] != from.Name || words[2] != "true" {
			return false
		}
		if len(words) > 3 { // failed
			require.Positive(m.t, m.waits, state)
			return false
		}
		return words[0] != from.Spec.NodeName
	})
	m.moved(began, from.Spec.NodeName)
}

// migrate moves the machine to the other node, by a migration of this name, while act happens, and
// waits for its end.
func (m *machine) migrate(name string, act func()) {
	m.t.Helper()
	began, from := time.Now(), m.pod.Spec.NodeName
	m.t.Cleanup(func() {
		if m.t.Failed() {
			m.c.tell(m.t, "get", "vmim", name, "-o", "yaml")
		}
	})
	m.c.Apply(m.t, migration(name, m.name))
	act()
	m.c.until(m.t, "migration "+name+" has succeeded", func() bool {
		phase := m.phase(name)
		require.NotEqual(m.t, "Failed", phase)
		return phase == "Succeeded"
	})
	m.moved(began, from)
}

// moved finds the pod of a machine that has moved.
func (m *machine) moved(began time.Time, from string) {
	m.t.Helper()
	m.find()
	require.NotEqual(m.t, from, m.pod.Spec.NodeName)
	m.t.Logf("%s has moved from %s to %s in %.1f s", m.name, from, m.pod.Spec.NodeName,
		time.Since(began).Seconds())
}

// refused is a machine whose disks are in its pod. A migration is refused with words that people
// find where the documentation says; the guest goes on with its data, and can be moved no later
// either. KubeVirt asks one of the hooks, and makes the next pod when both have ended.
func (c *cluster) refused(t *testing.T) {
	c.Apply(t, c.instance("refused", ownImage+", "+ownImage, ""))
	m := c.running(t, "refused")
	m.write("/dev/vda")
	for _, name := range []string{"refused-1", "refused-2"} {
		c.Apply(t, migration(name, m.name))
		var said string // by the target's hook, while its pod is there
		c.until(t, name+" has failed", func() bool {
			target := c.Kubectl(t, "get", "pods", "-l", "kubevirt.io/migrationJobUID="+
				c.Kubectl(t, "get", "vmim", name, "-o", "jsonpath={.metadata.uid}"), "-o",
				"jsonpath={.items[*].metadata.name}")
			if out, err := c.TryKubectl("", "logs", target, "-c", "hook-sidecar-0"); err == nil {
				said = out
			}
			phase := c.Kubectl(t, "get", "vmim", name, "-o", "jsonpath={.status.phase}")
			require.NotEqual(t, "Succeeded", phase)
			return phase == "Failed"
		})
		const why = "would meet another disk"
		require.Contains(t, said, why)
		require.Contains(t, c.Kubectl(t, "get", "events", "--field-selector",
			"involvedObject.name="+m.name), why)
		m.writes(10)
	}
	m.found("/dev/vda")
	m.delete("vmi")
}

// migration asks KubeVirt to move a machine.
func migration(name, machine string) string {
	return "{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstanceMigration, metadata: {name: " +
		name + "}, spec: {vmiName: " + machine + "}}"
}
