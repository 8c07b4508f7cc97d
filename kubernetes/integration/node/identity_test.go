package node

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
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
	end := n.compared(t, pod.Name)
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

// fill lets a claim begin with the disk that a machine was exported as, and compares its content.
// The test makes the volume, as a driver does.
func (n *Node) fill(t *testing.T, image Image, end int) {
	t.Helper()
	n.Apply(t, plane.FillRights(system, "kubevirt-disk-controller"))
	n.Kubectl(t, "patch", "deployment", "kubevirt-disk-controller", "-n", system, "--type=json",
		"--patch", `[{"op": "add", "path": "/spec/template/spec/containers/0/args/-",
		"value": "--fill-claims"}]`)
	n.Apply(t, `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: driver}
provisioner: driver.example.com
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMImage
metadata: {name: golden}
spec: {image: "`+exported+`", registryCA: {name: kube-root-ca.crt}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: begins}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: driver
  resources: {requests: {storage: 20Gi}}
  dataSourceRef: {apiGroup: disk.kubevirt.io, kind: VMImage, name: golden}
`)
	claim := "vmfill-" + n.Kubectl(t, "get", "pvc", "begins", "-o", "jsonpath={.metadata.uid}")
	n.until(t, "the claim that is filled is there", func() bool {
		_, err := n.TryKubectl("", "get", "pvc", claim)
		return err == nil
	})
	volume := volume(t, n, "filled", "ReadWriteOnce")
	_, volume, _ = strings.Cut(volume, "---\n")
	n.Apply(t, strings.Replace(volume, "storageClassName: local", "storageClassName: driver\n"+
		"  claimRef: {namespace: default, name: "+claim+"}", 1))
	out, err := n.TryKubectl("", "wait", "pvc", "begins", "--for=jsonpath={.status.phase}=Bound",
		"--timeout=5m")
	if err != nil {
		state, _ := n.TryKubectl("", "describe", "vmimage,pvc,job")
		logs, _ := n.TryKubectl("", "logs", "-l", v1alpha1.Group+"/fill", "--tail=-1")
		t.Fatalf("%s\n%s\n%s", out, state, logs)
	}
	n.until(t, "what has filled it is gone", func() bool {
		_, err := n.TryKubectl("", "get", "pvc", claim)
		return err != nil
	})
	compareWithMachine(t, filepath.Join(n.Dir, "filled", "disk.img"),
		filepath.Join(image.Files["/disk"], "disk.raw"), end)
}

// exported is the image that a machine's disk is exported as.
const exported = RegistryAddress + "/golden/machine:1"

// export commits the disk of a machine that has ended to the registry. The new image has the layers
// of the old one and what differs, and its disk is what the guest has left: the image, and its
// blocks up to a byte behind that.
func (n *Node) export(t *testing.T, identity string, image Image, end int) {
	t.Helper()
	const reference = exported
	// The cluster's authority has signed the registry's certificate, and each namespace has it.
	n.Kubectl(t, "patch", "vmid", identity, "--type=merge", "--patch", `{"spec": {"export": {
		"reference": "`+reference+`", "registryCA": {"name": "kube-root-ca.crt"}}}}`)
	out, err := n.TryKubectl("", "wait", "vmid", identity, "--for=condition="+
		v1alpha1.ConditionExported, "--timeout=5m")
	if err != nil {
		state, _ := n.TryKubectl("", "get", "vmid", identity, "-o", "yaml")
		pods, _ := n.TryKubectl("", "describe", "pods", "-l", v1alpha1.LabelExport)
		logs, _ := n.TryKubectl("", "logs", "-l", v1alpha1.LabelExport, "--tail=-1")
		t.Fatalf("%s\n%s\n%s\n%s", out, state, pods, logs)
	}
	digest := n.Kubectl(t, "get", "vmid", identity, "-o", "jsonpath={.status.export.digest}")
	manifest := func(reference string) (m v1.Manifest) {
		out, err := n.Command(t.Context(), "skopeo", "inspect", "--raw", "--tls-verify=false",
			"docker://"+reference).CombinedOutput()
		require.NoError(t, err, string(out))
		require.NoError(t, json.Unmarshal(out, &m))
		return m
	}
	repository, _, _ := strings.Cut(reference, ":1")
	before, after := manifest(image.Name), manifest(repository+"@"+digest)
	require.Greater(t, len(after.Layers), len(before.Layers))
	for i, l := range before.Layers {
		require.Equal(t, l.Digest, after.Layers[i].Digest)
	}
	var more int64
	for _, l := range after.Layers[len(before.Layers):] {
		more += l.Size
	}
	require.Less(t, more, int64(end)+1<<20, "what differs is stored, and nothing else")
	disk := filepath.Join(t.TempDir(), "disk.img")
	program := Build(t, ".", "./cmd/kubevirt-disk")
	said, err := n.Command(t.Context(), program, "pull", reference, disk,
		"--registry-ca="+filepath.Join(n.certificates(), "ca.crt")).CombinedOutput()
	require.NoError(t, err, string(said))
	compareWithMachine(t, disk, filepath.Join(image.Files["/disk"], "disk.raw"), end)
}

// compareWithMachine compares a disk with what a machine of bootImage has left: the image, its
// numbers from firstBlock to a byte behind that, and nothing else.
func compareWithMachine(t *testing.T, disk, image string, end int) {
	t.Helper()
	got := testtool.Must(os.Open(disk))(t)
	defer got.Close()
	want := testtool.Must(os.ReadFile(image))(t)
	begin := make([]byte, len(want))
	require.NoError(t, testtool.Err(io.ReadFull(got, begin)))
	require.True(t, bytes.Equal(want, begin), "the image has changed")
	require.NoError(t, testtool.Err(got.Seek(int64(firstBlock*blockSize), io.SeekStart)))
	in := bufio.NewReaderSize(got, 1<<20)
	line, lines := make([]byte, len("10000000\n")), (end-1)/len("10000000\n")
	require.Positive(t, lines)
	for i := range lines {
		require.NoError(t, testtool.Err(io.ReadFull(in, line)))
		require.Equal(t, fmt.Sprintf("%d\n", 10000000+i), string(line))
	}
	// The last block may have been under way when the machine was killed.
	at := (firstBlock + (end-1)/blockSize + 1) * blockSize
	require.NoError(t, testtool.Err(got.Seek(int64(at), io.SeekStart)))
	none, rest := make([]byte, 1<<20), make([]byte, 1<<20)
	for {
		n, err := got.Read(rest)
		require.True(t, bytes.Equal(none[:n], rest[:n]), "behind what the guest has written")
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
	}
}
