package node

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// machineThatMoves has its disk in a pod of its own. Its launcher pod gets a sidecar that hands the
// disk on by NBD with TLS. The pod that a migration moves it into starts beside the first one. Once
// its hook was called it reads what the first one writes, and its first write takes the disk over:
// the first one is refused from then on. The next start finds all of it.
func (n *Node) machineThatMoves(t *testing.T) {
	const machine = "mover"
	source := n.movingPod(t, machine, "")
	n.startMachine(t, source)
	n.nameService(t, machine)
	n.Kubectl(t, "wait", "pod/"+source.Name, "--for=condition=Ready", "--timeout=5m")
	require.Equal(t, v1alpha1.DiskURI(v1alpha1.ClaimName(machine)+".default.svc"),
		n.Kubectl(t, "get", "pod", source.Name, "-o",
			`jsonpath={.metadata.annotations.disk\.kubevirt\.io/disk}`), "by NBD with TLS")
	require.Contains(t, n.define(t, source, "{}"), `socket="`+diskSocket+`"`)
	n.uses(t, source, "write -P 1 100M 1M", "flush", "read -P 1 100M 1M")

	target := n.movingPod(t, machine, "-target")
	target.Labels["kubevirt.io/migrationJobUID"] = "5d0c2d1e-0000-4000-8000-000000000001"
	n.applyObject(t, target) // it is not refused
	n.Kubectl(t, "wait", "pod/"+target.Name, "--for=condition=Ready", "--timeout=5m")
	require.Equal(t, "Running", n.Kubectl(t, "get", "pod", source.Name, "-o",
		"jsonpath={.status.phase}"), "the target was not held until the source ended")
	n.define(t, target, fmt.Sprintf(
		`{"migrationState": {"targetPod": %q, "targetNode": %q, "sourceNode": %[2]q}}`,
		target.Name, n.name))
	n.logged(t, target.Name, admission.HookContainer, "its first write takes the disk over")
	n.uses(t, source, "write -P 2 101M 1M", "flush")
	n.uses(t, target, "read -P 1 100M 1M", "read -P 2 101M 1M")

	n.uses(t, target, "write -P 3 102M 1M", "flush")
	require.Contains(t, n.io(source, "write -P 4 102M 1M"), "write failed", "it is fenced")
	n.logged(t, source.Name, admission.HookContainer, "belongs to another client now")
	n.uses(t, target, "read -P 3 102M 1M")
	n.Kubectl(t, "delete", "pod", source.Name)
	all := []string{"read -P 1 100M 1M", "read -P 2 101M 1M", "read -P 3 102M 1M"}
	n.uses(t, target, append(all, "write -P 5 103M 1M", "flush")...)
	n.Kubectl(t, "delete", "pod", target.Name)

	next := n.movingPod(t, machine, "-next")
	n.startMachine(t, next)
	n.define(t, next, "{}")
	n.uses(t, next, append(all, "read -P 5 103M 1M")...)
	n.Kubectl(t, "delete", "pod", next.Name)
}

// movingPod is a launcher pod of a machine of set "moves". Its QEMU has no machine: programs in the
// same container use the disk. There is no DNS here, so it has a file of hosts, and waits for it.
func (n *Node) movingPod(t *testing.T, machine, suffix string) *corev1.Pod {
	t.Helper()
	pod := n.launcherPod(t, machine, "moves")
	pod.Name += suffix
	compute, hook := &pod.Spec.Containers[0], &pod.Spec.Containers[1]
	require.Equal(t, admission.HookContainer, hook.Name)
	compute.Args = []string{"-machine", "none", "-nodefaults", "-no-user-config", "-display",
		"none"}
	hook.VolumeMounts = append(hook.VolumeMounts, corev1.VolumeMount{Name: "hosts",
		MountPath: "/etc/hosts", SubPath: "hosts", ReadOnly: true})
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "hosts",
		VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: machine + "-hosts"}}}})
	t.Cleanup(func() { n.explain(t, pod.Name, "compute", admission.HookContainer) })
	return pod
}

// nameService waits for the Service of a machine's disk, and makes the file of hosts that names it.
func (n *Node) nameService(t *testing.T, machine string) {
	t.Helper()
	service, address := v1alpha1.ClaimName(machine), ""
	n.until(t, "the disk has its Service", func() bool {
		var err error
		address, err = n.TryKubectl("", "get", "service", service, "-o",
			"jsonpath={.spec.clusterIP}")
		return err == nil && address != ""
	})
	n.Kubectl(t, "create", "configmap", machine+"-hosts",
		"--from-literal=hosts="+address+" "+service+".default.svc\n")
}

// io has qemu-io use the disk of a launcher pod, in the place of its QEMU, and returns its words.
func (n *Node) io(pod *corev1.Pod, commands ...string) string {
	args := []string{"exec", pod.Name, "-c", "compute", "--", "qemu-io", "-f", "raw"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out, err := n.TryKubectl("", append(args, "nbd+unix:///1?socket="+diskSocket)...)
	return fmt.Sprintf("%s%v", out, err)
}

// uses is io that must succeed.
func (n *Node) uses(t *testing.T, pod *corev1.Pod, commands ...string) {
	t.Helper()
	out := n.io(pod, commands...)
	require.Regexp(t, "<nil>$", out)
	require.NotContains(t, out, "failed", commands)
}
