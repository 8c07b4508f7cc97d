package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/kubernetes/plane"
	"kubevirt.io/disk/internal/testtool"
)

// TestExamples runs the examples for users on a real node, as they stand, under pod security
// `restricted`: a machine in QEMU that logs in to its disk by CHAP, and a decoupled disk behind a
// Service. It kills the disk's container while the machine runs.
func TestExamples(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-system-x86_64")
	plane.Binaries(t, binaries...)
	disk := filepath.Join(t.TempDir(), "disk.qcow2")
	out, err := exec.Command("qemu-img", "create", "-f", "qcow2", disk, "64M").CombinedOutput()
	require.NoError(t, err, string(out))
	n := Start(t, DiskImage(t, "registry.example.com/my-fedora:1", disk),
		QEMUImage(t, "registry.example.com/qemu:1"))
	n.Kubectl(t, "label", "ns", "default", "pod-security.kubernetes.io/enforce=restricted")
	n.Apply(t, example(t, "secret.yaml"))
	const serves = "serving a LUN"
	t.Run("sidecar", func(t *testing.T) {
		n.Apply(t, example(t, "sidecar-env.yaml"))
		t.Cleanup(func() { n.Kubectl(t, "delete", "pod", "vm-env", "--grace-period=5") })
		t.Cleanup(func() { n.explain(t, "vm-env", "vm") })
		n.Kubectl(t, "wait", "pod/vm-env", "--for=condition=Ready", "--timeout=5m")
		n.logged(t, "vm-env", "disk", serves)
		n.logged(t, "vm-env", "disk", `"initiator":"iqn.2017-01.io.kubevirt:vm"`)
		id := n.Kubectl(t, "get", "pod", "vm-env", "-o",
			"jsonpath={.status.initContainerStatuses[0].containerID}")
		n.kill(t, id)
		n.until(t, "the disk's container runs again", func() bool {
			out, err := n.TryKubectl("", "get", "pod", "vm-env", "-o",
				"jsonpath={.status.initContainerStatuses[0].containerID} "+
					"{.status.initContainerStatuses[0].ready}")
			return err == nil && !strings.HasPrefix(out, id) && strings.HasSuffix(out, " true")
		})
		n.logged(t, "vm-env", "disk", `"initiator":"iqn.2017-01.io.kubevirt:vm"`)
		require.Equal(t, "0", n.Kubectl(t, "get", "pod", "vm-env", "-o",
			"jsonpath={.status.containerStatuses[0].restartCount}"), "the machine runs on")
	})
	t.Run("decoupled", func(t *testing.T) {
		n.Apply(t, volume(t, n, "pv0", "ReadWriteOnce"))
		n.Apply(t, example(t, "decoupled.yaml"))
		n.Kubectl(t, "rollout", "status", "deployment/my-fedora-disk", "--timeout=5m")
		require.Equal(t, "Bound", n.Kubectl(t, "get", "pvc", "my-fedora-disk", "-o",
			"jsonpath={.status.phase}"))
	})
}

// example is a file of examples/kubernetes.
func example(t *testing.T, name string) string {
	t.Helper()
	root, err := plane.Root()
	require.NoError(t, err)
	data, err := os.ReadFile(filepath.Join(root, "examples/kubernetes", name))
	require.NoError(t, err)
	return string(data)
}

// volume is a directory of the node as a volume of the default class.
func volume(t *testing.T, n *Node, name, mode string) string {
	t.Helper()
	dir := filepath.Join(n.Dir, name)
	require.NoError(t, os.Mkdir(dir, 0o777))
	require.NoError(t, os.Chmod(dir, 0o777)) // a local volume has its owner from whoever made it
	return `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: local
  annotations: {storageclass.kubernetes.io/is-default-class: "true"}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: ` + name + `}
spec:
  capacity: {storage: 20Gi}
  accessModes: [` + mode + `]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: local
  local: {path: ` + dir + `}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node1]}]
`
}

// logged waits until a container has logged a text.
func (n *Node) logged(t *testing.T, pod, container, text string) {
	t.Helper()
	n.until(t, container+" logs "+text, func() bool {
		out, err := n.TryKubectl("", "logs", pod, "-c", container)
		return err == nil && strings.Contains(out, text)
	})
}

// explain logs what became of a container if the test failed.
func (n *Node) explain(t *testing.T, pod, container string) {
	if !t.Failed() {
		return
	}
	for _, args := range [][]string{{"logs", pod, "-c", container},
		{"logs", pod, "-c", container, "--previous"}, {"describe", "pod", pod}} {
		out, _ := n.TryKubectl("", args...) // the error is in out
		t.Log(strings.Join(args, " ") + "\n" + out)
	}
}

// kill kills a container, as a lack of memory would.
func (n *Node) kill(t *testing.T, id string) {
	t.Helper()
	out, err := n.Command(t.Context(), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL",
		strings.TrimPrefix(id, "containerd://")).CombinedOutput()
	require.NoError(t, err, string(out))
}
