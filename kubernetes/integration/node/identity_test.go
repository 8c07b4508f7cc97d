package node

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const (
	// As the manifest names them.
	serverImage     = "docker.io/library/kubevirt.io:disk"
	controllerImage = "docker.io/library/kubevirt.io:disk-controller"
	system          = "kubevirt-disk-system"
)

// TestIdentity installs the controller on a real node. A pod with an identity boots a Linux guest
// from its disk in QEMU, and the guest writes. Meanwhile the disk's container is killed; the guest
// waits for the next one and goes on. The controller that leads is killed, too, and the other one
// leads. Then the pod is deleted and made again, and its guest finds all data, above an image that
// comes as an image volume. Last, the disk is exported to a registry whose certificate a private
// authority has signed.
func TestIdentity(t *testing.T) {
	testtool.Need(t, "docker-registry", "qemu-system-x86_64", "skopeo")
	plane.Binaries(t, binaries...)
	linux := bootImage(t, RegistryAddress+"/vmdisks/linux:1")
	n := Start(t, DiskImage(t, serverImage, ""), QEMUImage(t, qemuImage), linux,
		ControllerImage(t, controllerImage))
	n.Kubectl(t, "label", "ns", "default", "pod-security.kubernetes.io/enforce=restricted")
	n.ServeRegistry(t, RegistryAddress, true, linux)
	n.installController(t)
	n.Apply(t, volume(t, n, "pv0", "ReadWriteOncePod"))
	size := resource.MustParse("1Gi") // larger than the image
	set := &v1alpha1.VMIdentitySet{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(),
			Kind: "VMIdentitySet"},
		ObjectMeta: metav1.ObjectMeta{Name: "linux", Namespace: "default"},
		Spec: v1alpha1.DiskSpec{Size: &size,
			Image: RegistryAddress + "/vmdisks/linux@" + n.digests[linux.Name]}}
	n.applyObject(t, set)
	pod := machinePod("machine", set)
	defer func() { n.explain(t, pod.Name, "vm", v1alpha1.DiskContainer) }()

	n.startMachine(t, pod)
	wrote := n.untilWritten(t, pod.Name, 8)
	led := n.killLeader(t)
	n.killDisk(t, pod.Name) // while the guest writes
	wrote = n.untilWritten(t, pod.Name, wrote+8)
	require.Equal(t, "0", n.restarts(t, pod.Name), "the machine runs on")
	n.Kubectl(t, "delete", "pod", pod.Name)

	n.until(t, "another controller leads", func() bool {
		leader := n.leader(t)
		return leader != "" && leader != led
	})
	n.startMachine(t, pod)
	end := -1
	n.until(t, "the next machine has compared the disk", func() bool {
		end = n.said(t, pod.Name, found)
		return end >= 0
	})
	require.Greater(t, end, wrote*blockSize, "the first byte that nobody has written")
	n.Kubectl(t, "wait", "pod/"+pod.Name, "--for=jsonpath={.status.phase}=Succeeded",
		"--timeout=5m")
	require.Contains(t, n.Kubectl(t, "get", "vmid", pod.Name), "true")
	n.export(t, pod.Name, linux, end)
	n.fill(t, linux, end)
}

// installController applies the manifest, and waits until both controllers run.
func (n *Node) installController(t *testing.T) {
	t.Helper()
	n.Kubectl(t, "apply", "--server-side", "-f", controllertest.Manifest(t))
	out, err := n.TryKubectl("", "rollout", "status", "deployment/kubevirt-disk-controller", "-n",
		system, "--timeout=5m")
	if err != nil {
		pods, _ := n.TryKubectl("", "describe", "pods", "-n", system)
		logs, _ := n.TryKubectl("", "logs", "deployment/kubevirt-disk-controller", "-n", system)
		t.Fatalf("%s\n%s\n%s", out, pods, logs)
	}
}

func (n *Node) applyObject(t *testing.T, object any) {
	t.Helper()
	n.Apply(t, string(testtool.Must(json.Marshal(object))(t)))
}

// leader is the name of the controller's pod that leads.
func (n *Node) leader(t *testing.T) string {
	t.Helper()
	holder := n.Kubectl(t, "get", "lease", "kubevirt-disk-controller", "-n", system, "-o",
		"jsonpath={.spec.holderIdentity}")
	pod, _, _ := strings.Cut(holder, "_") // a random part follows
	return pod
}

// killLeader kills the controller that leads, with its pod, and returns the pod's name.
func (n *Node) killLeader(t *testing.T) string {
	t.Helper()
	require.Equal(t, "2", n.Kubectl(t, "get", "deployment", "kubevirt-disk-controller", "-n",
		system, "-o", "jsonpath={.status.readyReplicas}"))
	led := n.leader(t)
	// Not by deleting the pod alone: it would be told to end, and resign.
	n.Kill(t, n.Kubectl(t, "get", "pod", led, "-n", system, "-o",
		"jsonpath={.status.containerStatuses[0].containerID}"))
	n.Kubectl(t, "delete", "pod", led, "-n", system, "--wait=false")
	return led
}
