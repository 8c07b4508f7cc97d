package kubevirt

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// killed is a machine with a claim, whose guest writes all the time. Its hook sidecar is killed,
// and its task is started again on the node: the guest goes on. It is killed again, and the
// machine pauses; an ephemeral container serves the disk, and KubeVirt resumes the machine.
func (c *cluster) killed(t *testing.T) {
	dir := c.volume(t, "killed-disk", "ReadWriteOnce")
	c.Apply(t, strings.ReplaceAll(c.manifest(t, "stays.yaml"), "stays", "killed"))
	m := c.running(t, "killed")
	m.write("/dev/vda")
	m.writes(10)
	hook, on := m.container("hook-sidecar-0"), c.at(m.pod.Spec.NodeName)

	on.Kill(t, hook)
	task := func(args ...string) bool {
		return on.Command(t.Context(), append([]string{"ctr", "-n", "k8s.io", "tasks"},
			args...)...).Run() == nil
	}
	c.until(t, "the hook sidecar runs again", func() bool {
		task("delete", hook) // fails if the kubelet was faster
		return task("start", "--detach", "--null-io", hook)
	})
	m.writes(10)
	if c.qemu != earlierQEMU { // libvirt 9.0 knows no time for which QEMU waits
		require.Equal(t, "False", m.paused(), "the machine only waited")
	}

	on.Kill(t, hook)
	c.until(t, "the machine is paused", func() bool { return m.paused() == "True" })
	require.Contains(t, c.Kubectl(t, "exec", m.pod.Name, "-c", "compute", "--", "virsh", "-c",
		"qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock", "domstate", "--reason",
		c.namespace+"_"+m.name), "I/O error")
	c.Kubectl(t, "patch", "pod", m.pod.Name, "--subresource=ephemeralcontainers",
		"--type=strategic", "-p", fmt.Sprintf(again, guestImage, "killed-disk"))
	c.until(t, "KubeVirt resumes the machine", func() bool { return m.paused() == "False" })
	m.writes(10)
	written := m.found("/dev/vda")
	c.Kubectl(t, "delete", "vm", m.name)
	kept(t, dir, written)
}

// again is the ephemeral container of docs/kubevirt.md.
const again = `{"spec": {"ephemeralContainers": [{
	"name": "again", "image": "%s",
	"args": ["serve", "--iscsi=false", "--metrics-listen=", "--persistent-dir=/data",
	         "--nbd=unix:/hooks/hook-sidecar-0/disk/nbd.sock"],
	"securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
	                    "runAsNonRoot": true, "runAsUser": 107, "runAsGroup": 107},
	"volumeMounts": [{"name": "hook-sidecar-sockets", "mountPath": "/hooks"},
	                 {"name": "%s", "mountPath": "/data"}]}]}}`

// ended is a machine whose hook sidecar is told to end, while its guest writes, and the kubelet of
// whose node is killed and comes back. Neither is seen by the guest: the hook ends after it.
func (c *cluster) ended(t *testing.T) {
	c.Apply(t, c.instance("ended", ownImage, ""))
	m := c.running(t, "ended")
	m.write("/dev/vda")
	on := c.at(m.pod.Spec.NodeName)
	out, err := on.Command(t.Context(), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGTERM",
		m.container("hook-sidecar-0")).CombinedOutput()
	require.NoError(t, err, string(out))
	m.writes(10)
	on.KillKubelet(t)
	m.writes(10)
	c.Kubectl(t, "wait", "node", on.Name(), "--for=condition=Ready", "--timeout=5m")
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vmi")
}

// paused is the condition Paused of the machine.
func (m *machine) paused() string {
	m.t.Helper()
	status := m.c.Kubectl(m.t, "get", "vmi", m.name, "-o",
		`jsonpath={.status.conditions[?(@.type=="Paused")].status}`)
	if status == "" {
		return "False"
	}
	return status
}
