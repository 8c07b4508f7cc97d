package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestTwoNodes runs two real nodes, with the controller on both.
func TestTwoNodes(t *testing.T) {
	testtool.Need(t, "qemu-system-x86_64")
	plane.Binaries(t, binaries...)
	linux := bootImage(t, "registry.example.com/vmdisks/linux:1")
	plain := plainImage(t, "registry.example.com/vmdisks/plain:1")
	n := Start(t, DiskImage(t, serverImage, ""), QEMUImage(t, qemuImage), linux, plain,
		ControllerImage(t, controllerImage))
	other := n.Join(t)
	n.Kubectl(t, "label", "ns", "default", "pod-security.kubernetes.io/enforce=restricted")
	n.installController(t)
	n.allow(t)
	image := "registry.example.com/vmdisks/linux@" + n.digests[linux.Name]
	t.Run("move", func(t *testing.T) { n.move(t, other, image) })
	t.Run("service", func(t *testing.T) {
		n.service(t, other, image, "registry.example.com/vmdisks/plain@"+n.digests[plain.Name])
	})
}

// move moves a Local disk. A guest boots from it on the first node and writes. Its pod is deleted,
// and made again for the second node: the disk moves there, the guest boots there and finds all its
// data, and the first node's volume is removed.
func (n *Node) move(t *testing.T, other *Node, image string) {
	// Kubernetes itself removes a volume whose path is below a directory tmp.
	tmp := filepath.Join(n.Dir, "tmp")
	require.NoError(t, os.Mkdir(tmp, 0o755))
	former := filepath.Join(tmp, "former")
	n.Apply(t, volumeAt(t, n, former, "former", "ReadWriteOncePod", "hostPath", "Delete"))

	size, class := resource.MustParse("1Gi"), "local"
	set := &v1alpha1.VMIdentitySet{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(),
			Kind: "VMIdentitySet"},
		ObjectMeta: metav1.ObjectMeta{Name: "linux", Namespace: "default"},
		Spec: v1alpha1.DiskSpec{Size: &size, Type: v1alpha1.Local, StorageClassName: &class,
			Image: image}}
	n.applyObject(t, set)
	pod := machinePod("machine", set)
	defer func() {
		n.explain(t, pod.Name, "vm", v1alpha1.DiskContainer)
		n.explainMove(t)
	}()
	n.startMachine(t, pod)
	wrote := n.untilWritten(t, pod.Name, 8)
	require.Equal(t, n.name, n.nodeOf(t, pod.Name))
	n.Kubectl(t, "delete", "pod", pod.Name)

	n.Apply(t, volume(t, other, "fresh", "ReadWriteOncePod"))
	pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: other.name}
	n.startMachine(t, pod)
	n.until(t, "the former volume is removed", func() bool {
		_, err := os.Stat(former)
		return os.IsNotExist(err)
	})
	require.Equal(t, "fresh Bound", n.Kubectl(t, "get", "pvc", v1alpha1.ClaimName(pod.Name), "-o",
		"jsonpath={.spec.volumeName} {.status.phase}"), "it is removed last")
	n.Kubectl(t, "wait", "pv/former", "--for=delete", "--timeout=5m")
	end := n.compared(t, pod.Name)
	require.Greater(t, end, wrote*blockSize, "the first byte that nobody has written")
	n.Kubectl(t, "wait", "pod/"+pod.Name, "--for=jsonpath={.status.phase}=Succeeded",
		"--timeout=5m")
	require.Equal(t, other.name, n.nodeOf(t, pod.Name))
	require.Equal(t, other.name+" "+v1alpha1.ReasonMoved, n.Kubectl(t, "get", "vmid", pod.Name,
		"-o", `jsonpath={.status.nodeName} {.status.conditions[?(@.type=="Moving")].reason}`))
	require.FileExists(t, filepath.Join(other.Dir, "fresh/disk.img"))
}

// allow gives the installed manifest the rights and flags from the chart's localDisks.move and
// persistentVolumes.create. The policies of the manifest know its image by its short name.
func (n *Node) allow(t *testing.T) {
	t.Helper()
	const name = "kubevirt-disk-controller"
	n.Kubectl(t, "patch", "clusterrole", name+"-cluster", "--type=json", "-p", `[
		{"op": "add", "path": "/rules/-", "value":
			{"apiGroups": [""], "resources": ["persistentvolumes"],
			 "verbs": ["get", "create", "patch", "delete"]}},
		{"op": "add", "path": "/rules/-", "value":
			{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}}]`)
	n.Kubectl(t, "patch", "deployment", name, "-n", system, "--type=json", "-p", `[{"op": "add",
		"path": "/spec/template/spec/containers/0/args/-", "value": "--persistent-volumes"},
		{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--move-image=`+
		strings.TrimPrefix(controllerImage, "docker.io/library/")+`"}]`)
	n.Kubectl(t, "rollout", "status", "deployment/"+name, "-n", system, "--timeout=5m")
}

func (n *Node) nodeOf(t *testing.T, pod string) string {
	t.Helper()
	return n.Kubectl(t, "get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")
}

// explainMove logs the state of a move if the test failed.
func (n *Node) explainMove(t *testing.T) {
	if !t.Failed() {
		return
	}
	for _, args := range [][]string{{"get", "nodes,pv,pvc,jobs,pods", "-A", "-o", "wide"},
		{"describe", "vmid,jobs"}, {"logs", "-n", system, "deployment/kubevirt-disk-controller",
			"--all-pods", "--tail=100"}} {
		out, _ := n.TryKubectl("", args...) // the error is in out
		t.Log(out)
	}
}
