package kubevirt

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/node"
)

// throwaway is a machine whose disk ends with it. The guest reads each block as the image has it,
// and writes; it is paused, and deleted.
func (c *cluster) throwaway(t *testing.T) {
	c.Apply(t, c.manifest(t, "throwaway.yaml"))
	m := c.running(t, "throwaway")
	require.Equal(t, c.imageSum(t), m.sum("/dev/vda"), "what the guest reads")
	require.Contains(t, c.Kubectl(t, "exec", m.pod.Name, "-c", "hook-sidecar-0", "--",
		"kubevirt-disk", "sessions"), " unix:", "QEMU is at the socket, not at the address")
	require.Equal(t, c.qemu, m.qemu())
	m.write("/dev/vda")
	c.virtctl(t, "pause", "vmi", m.name)
	c.Kubectl(t, "wait", "vmi", m.name, "--for=condition=Paused", "--timeout=5m")
	c.virtctl(t, "unpause", "vmi", m.name)
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vm")
}

// replaced is a machine whose own disk, of KubeVirt, gets our source: it has one disk, with the bus
// and the serial number that KubeVirt gave it.
func (c *cluster) replaced(t *testing.T) {
	c.Apply(t, c.manifest(t, "replaced.yaml"))
	m := c.running(t, "replaced")
	require.Equal(t, "sda", m.run("cd /sys/block; echo [sv]d*"))
	require.Equal(t, "of-kubevirt", m.run("cat /sys/block/sda/device/vpd_pg80 | tr -dc a-z-"))
	require.Equal(t, c.imageSum(t), m.sum("/dev/sda"))
	m.write("/dev/sda")
	m.writes(10)
	m.found("/dev/sda")
	m.delete("vmi")
}

// streamed is a machine whose image is only in a registry: the base image fetches it while the
// guest boots.
func (c *cluster) streamed(t *testing.T) {
	c.Apply(t, c.instance("streamed", c.streams(), ""))
	m := c.running(t, "streamed")
	require.Equal(t, c.imageSum(t), m.sum("/dev/vda"))
	m.write("/dev/vda")
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vmi")
}

// existing is a machine from an image of a registry that others have made. Its disk is larger.
func (c *cluster) existing(t *testing.T) {
	c = c.in(t, "existing", "registries: trusted")
	c.Apply(t, c.manifest(t, "existing.yaml"))
	m := c.running(t, "existing")
	require.Equal(t, "41943040", m.run("cat /sys/block/vda/size"), "20 GiB")
	require.Equal(t, c.imageSum(t), m.begin("/dev/vda"))
	m.write("/dev/vda")
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vm")
}

// streams is a hook sidecar that streams the guest's image.
func (c *cluster) streams() string {
	return `{"image": "` + baseImage + `", "args": ["serve", "--image", "` + c.digest(streamedImage) +
		`", "--insecure-registry", "` + node.RegistryAddress + `"]}`
}

// imageSum is the SHA-256 of the guest's disk as the image has it.
func (c *cluster) imageSum(t *testing.T) string {
	t.Helper()
	return strings.Fields(output(t, "sha256sum", c.raw))[0]
}

// ownImage is a hook sidecar with an image of its own.
const ownImage = `{"image": "` + guestImage + `"}`

// instance is a machine with hook sidecars, in JSON, and more of its domain.
func (c *cluster) instance(name, sidecars, domain string) string {
	return `
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata:
  name: ` + name + `
  annotations:
    hooks.kubevirt.io/hookSidecars: '[` + sidecars + `]'
spec:
  evictionStrategy: None
  domain:
    devices: {}
    memory: {guest: 128Mi}
` + domain
}

// digest is the name of an image with its digest in the place of its tag.
func (c *cluster) digest(image string) string {
	return image[:strings.LastIndex(image, ":")] + "@" + c.Digest(image)
}

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
