package node

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestExamples runs the examples for users on a real node, unchanged, under pod security
// `restricted`: machines in QEMU that log in to their disks with CHAP, an uploaded disk, and a
// decoupled disk behind a Service with its volume. It kills a disk's container while the machine
// runs. Only the node's own initiator is missing: the kernel's, which the volume needs.
func TestExamples(t *testing.T) {
	testtool.Need(t, "curl", "qemu-img", "qemu-io", "qemu-system-x86_64")
	plane.Binaries(t, binaries...)
	disk := filepath.Join(t.TempDir(), "disk.qcow2")
	for _, args := range [][]string{{"qemu-img", "create", "-f", "qcow2", disk, "64M"},
		{"qemu-io", "-c", "write -P 9 1M 3M", disk}} {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	n := Start(t, DiskImage(t, "registry.example.com/my-fedora:1", disk),
		DiskImage(t, "registry.example.com/kubevirt.io:disk", ""), QEMUImage(t, qemuImage))
	n.Kubectl(t, "label", "ns", "default", "pod-security.kubernetes.io/enforce=restricted")
	n.Apply(t, example(t, "secret.yaml"))
	// Each machine has an initiator name of its own, made of its pod's uid.
	loggedIn := func(t *testing.T, pod string) string {
		uid := n.Kubectl(t, "get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
		require.NotEmpty(t, uid)
		return `"initiator":"iqn.2017-01.io.kubevirt:` + uid + `"`
	}
	t.Run("sidecar", func(t *testing.T) {
		n.pod(t, "sidecar-env.yaml", "vm-env", "disk", "vm")
		n.logged(t, "vm-env", "disk", "serving a LUN")
		n.logged(t, "vm-env", "disk", loggedIn(t, "vm-env"))
		n.killDisk(t, "vm-env")
		n.logged(t, "vm-env", "disk", loggedIn(t, "vm-env"))
		require.Equal(t, "0", n.restarts(t, "vm-env"), "the machine runs on")
	})
	t.Run("sidecar with the credential in files", func(t *testing.T) {
		n.pod(t, "sidecar-files.yaml", "vm-files", "disk", "vm")
		n.logged(t, "vm-files", "disk", loggedIn(t, "vm-files"))
	})
	t.Run("upload", func(t *testing.T) {
		n.Apply(t, volume(t, n, "pv-upload", "ReadWriteOnce"))
		n.pod(t, "upload.yaml", "upload", "disk")
		n.upload(t, disk)
		n.logged(t, "upload", "disk", "the disk is complete") // all data is in disk.img now
		out, err := exec.Command("qemu-img", "compare", "-U", "-f", "qcow2", "-F", "raw", disk,
			filepath.Join(n.Dir, "pv-upload/disk.img")).CombinedOutput()
		require.NoError(t, err, string(out))
	})
	t.Run("decoupled", func(t *testing.T) {
		n.Apply(t, volume(t, n, "pv0", "ReadWriteOnce"))
		n.Apply(t, example(t, "decoupled.yaml"))
		n.Kubectl(t, "rollout", "status", "deployment/my-fedora-disk", "--timeout=5m")
		require.Equal(t, "Bound", n.Kubectl(t, "get", "pvc", "my-fedora-disk", "-o",
			"jsonpath={.status.phase}"))
	})
	t.Run("volume", func(t *testing.T) {
		n.Apply(t, example(t, "volume.yaml"))
		n.Kubectl(t, "wait", "pvc/my-fedora-root", "--for=jsonpath={.status.phase}=Bound",
			"--timeout=5m")
	})
}

// pod applies an example with a pod, waits until it is ready, and finally deletes it.
func (n *Node) pod(t *testing.T, file, name string, containers ...string) {
	t.Helper()
	n.Apply(t, example(t, file))
	t.Cleanup(func() { n.Kubectl(t, "delete", "pod", name, "--grace-period=5") })
	t.Cleanup(func() { n.explain(t, name, containers...) })
	n.Kubectl(t, "wait", "pod/"+name, "--for=condition=Ready", "--timeout=5m")
}

// upload sends a disk as upload.yaml says.
func (n *Node) upload(t *testing.T, disk string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	forward := n.Command(ctx, "kubectl", "port-forward", "pod/upload", "8443")
	said := testtool.Must(forward.StdoutPipe())(t)
	require.NoError(t, forward.Start())
	t.Cleanup(func() {
		_ = forward.Process.Kill()
		_ = forward.Wait() // it was killed
	})
	_, err := bufio.NewReader(said).ReadString('\n') // it prints a line when it listens
	require.NoError(t, err)
	out, err := n.Command(t.Context(), "curl", "-sS", "-f", "-T", disk,
		"http://127.0.0.1:8443/volume/default/data").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "state: ready")
}

// example is a file of examples/kubernetes.
func example(t *testing.T, name string) string {
	t.Helper()
	root := testtool.Must(plane.Root())(t)
	return string(testtool.Must(os.ReadFile(filepath.Join(root, "examples/kubernetes", name)))(t))
}

// volume makes a volume of the default class from a directory on the node. It is retained.
func volume(t *testing.T, n *Node, name, mode string) string {
	t.Helper()
	return volumeAt(t, n, filepath.Join(n.Dir, name), name, mode, "local", "Retain")
}

// volumeAt makes a directory, and a volume of some type from it, with its reclaim policy.
func volumeAt(t *testing.T, n *Node, dir, name, mode, kind, policy string) string {
	t.Helper()
	require.NoError(t, os.Mkdir(dir, 0o777))
	require.NoError(t, os.Chmod(dir, 0o777)) // whoever makes a local volume sets its owner
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
  persistentVolumeReclaimPolicy: ` + policy + `
  storageClassName: local
  ` + kind + `: {path: ` + dir + `}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [` + n.name + `]}]
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

// explain logs the state of a pod's containers if the test failed.
func (n *Node) explain(t *testing.T, pod string, containers ...string) {
	if !t.Failed() {
		return
	}
	ask := [][]string{{"describe", "pod", pod}}
	for _, c := range containers {
		ask = append(ask, []string{"logs", pod, "-c", c},
			[]string{"logs", pod, "-c", c, "--previous"})
	}
	for _, args := range ask {
		out, _ := n.TryKubectl("", args...) // the error is in out
		t.Log(strings.Join(args, " ") + "\n" + out)
	}
}

// killDisk kills the container of a pod's disk, its first init container, like a lack of memory. It
// returns when the kubelet has started another one that is ready.
func (n *Node) killDisk(t *testing.T, pod string) {
	t.Helper()
	const status = ".status.initContainerStatuses[0]"
	id := n.Kubectl(t, "get", "pod", pod, "-o", "jsonpath={"+status+".containerID}")
	n.Kill(t, id)
	n.until(t, "the disk's container runs again", func() bool {
		out, err := n.TryKubectl("", "get", "pod", pod, "-o",
			"jsonpath={"+status+".containerID} {"+status+".ready}")
		return err == nil && !strings.HasPrefix(out, id) && strings.HasSuffix(out, " true")
	})
}

// restarts returns how often a pod's own container was restarted.
func (n *Node) restarts(t *testing.T, pod string) string {
	t.Helper()
	return n.Kubectl(t, "get", "pod", pod, "-o",
		"jsonpath={.status.containerStatuses[0].restartCount}")
}
