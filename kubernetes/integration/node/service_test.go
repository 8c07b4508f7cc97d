package node

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const (
	served     = "served" // the identity of a machine
	longBlocks = "blocks" // that of a disk with logical blocks of 4096 bytes

	monitorPort, migrationPort = 4444, 4445
)

// rootClaim is the claim of an identity's PersistentVolume.
func rootClaim(identity string) string { return identity + "-root" }

// service serves a disk behind a Service. A guest that boots from it and writes moves from one node
// to the other while it runs, and so does the disk. Then the disk is a PersistentVolume that a
// kernel attaches, and so is one with blocks of 4096 bytes, from an image of plainImage.
func (n *Node) service(t *testing.T, other *Node, image, plain string) {
	size := resource.MustParse("1Gi")
	identities := map[string]v1alpha1.DiskSpec{served: {Image: image, Size: &size},
		longBlocks: {Image: plain, BlockSize: 4096}}
	for name, spec := range identities {
		n.Apply(t, volume(t, n, name, "ReadWriteOncePod"))
		class := "local"
		spec.StorageClassName, spec.Attachment = &class, v1alpha1.Service
		n.applyObject(t, &v1alpha1.VMIdentity{
			TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(),
				Kind: "VMIdentity"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default",
				Annotations: map[string]string{v1alpha1.AnnotationVolumeClaim: rootClaim(name)}},
			Spec: v1alpha1.VMIdentitySpec{DiskSpec: spec}})
	}
	defer n.explainMove(t)
	for name := range identities {
		for _, condition := range []string{v1alpha1.ConditionServed,
			v1alpha1.ConditionVolumeReady} {
			n.Kubectl(t, "wait", "vmid", name, "--for=condition="+condition, "--timeout=5m")
		}
	}
	blocks := n.migrate(t, other)
	n.attach(t, other, blocks)
}

// plainImage is a container image with a disk without partitions, full of plainText.
func plainImage(t *testing.T, name string) Image {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "disk.raw"),
		bytes.Repeat([]byte(plainText), 1<<20), 0o644))
	return Image{Name: name, Files: map[string]string{"/disk": dir}}
}

// plainText is a power of two long.
const plainText = "no MBR.\n"

// migrate boots a guest, and moves it to the other node while it writes, as
// docs/kubernetes-service.md says. It returns how many blocks the guest has written.
func (n *Node) migrate(t *testing.T, other *Node) int {
	here, there := "iqn.2017-01.io.kubevirt:node-1:vm", "iqn.2017-01.io.kubevirt:node-2:vm"
	source := n.startServed(t, "source", n, here)
	n.untilWritten(t, "source", 4)
	n.Kubectl(t, "annotate", "vmid", served, v1alpha1.AnnotationHandoverTo+"="+there)
	n.Kubectl(t, "wait", "vmid", served, "--for=jsonpath={.status.handover}=open "+there,
		"--timeout=5m")
	destination := n.startServed(t, "destination", other, there, "-incoming",
		fmt.Sprintf("tcp:0.0.0.0:%d", migrationPort))
	source.ask(`{"execute": "migrate", "arguments": {"uri": "tcp:%s:%d"}}`,
		n.addressOf(t, "destination"), migrationPort)
	n.until(t, "the guest has moved", func() bool {
		status := source.ask(`{"execute": "query-migrate"}`)["status"]
		require.NotEqual(t, "failed", status)
		return status == "completed" &&
			destination.ask(`{"execute": "query-status"}`)["status"] == "running"
	})
	n.Kubectl(t, "annotate", "vmid", served, v1alpha1.AnnotationHandoverStep+"=finish")
	n.Kubectl(t, "wait", "vmid", served, "--for=condition="+v1alpha1.ConditionHandedOver,
		"--timeout=5m")
	before := n.untilWritten(t, "source", 4)

	// The first machine resumes the guest that it still has in its memory.
	source.ask(`{"execute": "cont"}`)
	n.until(t, "the fenced guest fails", func() bool {
		out, err := n.TryKubectl("", "logs", "source")
		return err == nil && failed.MatchString(out)
	})
	out := n.Kubectl(t, "logs", "source")
	require.Contains(t, out, "Input/output error")
	// It may say once more what it wrote before.
	all := written.FindAllStringSubmatch(out, -1)
	last := testtool.Must(strconv.Atoi(all[len(all)-1][1]))(t)
	require.LessOrEqual(t, last, before+1, "the first machine has written after the handover")

	n.untilWritten(t, "destination", before+4)
	destination.ask(`{"execute": "quit"}`)
	n.Kubectl(t, "wait", "pod/destination", "--for=jsonpath={.status.phase}=Succeeded",
		"--timeout=5m")
	count := n.untilWritten(t, "destination", 1)
	n.Kubectl(t, "delete", "pod", "source", "destination")
	return count
}

// attach has a kernel attach the PersistentVolumes on the other node, by the fields and the secret
// that the API server has, and by the address of the Service. A guest does it in the network of the
// node, in place of a kubelet with open-iscsi: this machine's kernel may have no initiator. It
// finds all blocks, and writes.
func (n *Node) attach(t *testing.T, other *Node, blocks int) {
	attached := func(identity string) (script, device, iqn string) {
		var volume corev1.PersistentVolume
		n.read(t, &volume, "pv", n.Kubectl(t, "get", "pvc", rootClaim(identity), "-o",
			"jsonpath={.spec.volumeName}"))
		require.Equal(t, corev1.VolumeBound, volume.Status.Phase)
		require.Equal(t, corev1.PersistentVolumeBlock, *volume.Spec.VolumeMode)
		var secret corev1.Secret
		n.read(t, &secret, "secret", volume.Spec.ISCSI.SecretRef.Name, "-n",
			volume.Spec.ISCSI.SecretRef.Namespace)
		v := volume.Spec.ISCSI
		script, device, err := guest.Attach(&guest.ISCSI{TargetPortal: v.TargetPortal, IQN: v.IQN,
			Lun: v.Lun, ISCSIInterface: v.ISCSIInterface, Portals: v.Portals,
			DiscoveryCHAPAuth: v.DiscoveryCHAPAuth, SessionCHAPAuth: v.SessionCHAPAuth,
			InitiatorName: v.InitiatorName}, secret.Data)
		require.NoError(t, err)
		return script, device, v.IQN
	}
	root := testtool.Must(plane.Root())(t)
	opt := guest.Initiator("iqn.2017-01.io.kubevirt:node-2:kernel")
	opt.CacheDir = filepath.Join(root, "cache/guest")
	m, err := guest.Start(t.Context(), guest.MachineOptions{Dir: t.TempDir(), Guest: opt,
		In: []string{"nsenter", "-t", strconv.Itoa(other.pid), "-n", "--"}})
	guest.Made(t, err)
	defer m.Close()
	run := func(script string) {
		r := testtool.Must(m.Run(t.Context(), "set -e\n"+script, nil))(t)
		require.Zero(t, r.Status, r.Output)
	}
	script, device, iqn := attached(served)
	run(script + fmt.Sprintf(`
cd /tmp
seq 10000000 %d >want
dd if=%s of=have bs=%d skip=%d count=%d
cmp want have
dd if=/dev/urandom of=new bs=64k count=4
dd if=new of=%[2]s bs=64k seek=64 oflag=direct
test "$(dd if=%[2]s bs=64k skip=64 count=4 iflag=direct | md5sum)" = "$(md5sum <new)"
iscsiadm -m node -T %[6]s --logout
`, 10000000+blocks*blockLines-1, device, blockSize, firstBlock, blocks, iqn))

	script, device, iqn = attached(longBlocks)
	run(script + fmt.Sprintf(`
cd /tmp
name=$(readlink -f %[1]s)
test "$(cat /sys/block/${name##*/}/queue/logical_block_size)" = 4096
test "$(dd if=%[1]s bs=4k skip=1 count=1 iflag=direct | uniq)" = "%[2]s"
dd if=/dev/urandom of=new bs=4k count=1
dd if=new of=%[1]s bs=4k seek=1 oflag=direct
dd if=%[1]s of=have bs=4k skip=1 count=1 iflag=direct
cmp new have
iscsiadm -m node -T %[3]s --logout
`, device, strings.TrimSpace(plainText), iqn))
}

// read reads an object as kubectl gets it.
func (n *Node) read(t *testing.T, into any, args ...string) {
	t.Helper()
	text := n.Kubectl(t, append([]string{"get", "-o", "json"}, args...)...)
	require.NoError(t, json.Unmarshal([]byte(text), into))
}

// startServed starts the pod of a machine on a node, with the Service's disk, and connects to its
// monitor.
func (n *Node) startServed(t *testing.T, name string, on *Node, initiator string,
	args ...string) *monitor {
	t.Helper()
	// There is no DNS here, so it cannot be status.portal.
	address := n.Kubectl(t, "get", "service", v1alpha1.ClaimName(served), "-o",
		"jsonpath={.spec.clusterIP}")
	n.until(t, "kube-proxy knows the server at node "+on.name, func() bool {
		conn, err := on.dial(t, net.JoinHostPort(address, "3260"))
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	secret := v1alpha1.SecretName(served)
	pod := bootPod(name, secret, fmt.Sprintf("portal=%s:3260,target=%s,initiator-name=%s", address,
		n.Kubectl(t, "get", "vmid", served, "-o", "jsonpath={.status.targetName}"), initiator))
	pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: on.name}
	vm := &pod.Spec.Containers[0]
	vm.Args = append(append(vm.Args, "-qmp",
		fmt.Sprintf("tcp:0.0.0.0:%d,server=on,wait=off", monitorPort)), args...)
	pod.Spec.Volumes = []corev1.Volume{{Name: "chap", VolumeSource: corev1.VolumeSource{
		Secret: &corev1.SecretVolumeSource{SecretName: secret}}}}
	vm.VolumeMounts = []corev1.VolumeMount{{Name: "chap", MountPath: admission.CredentialDir,
		ReadOnly: true}}
	n.applyObject(t, pod)
	t.Cleanup(func() { n.explain(t, name, "vm") })
	n.Kubectl(t, "wait", "pod/"+name, "--for=condition=Ready", "--timeout=5m")
	require.Equal(t, on.name, n.nodeOf(t, name))
	q := &monitor{t: t}
	n.until(t, "QEMU listens", func() bool {
		var err error
		q.conn, err = n.dial(t, net.JoinHostPort(n.addressOf(t, name), strconv.Itoa(monitorPort)))
		return err == nil
	})
	t.Cleanup(func() { q.conn.Close() })
	q.answers = bufio.NewScanner(q.conn)
	require.True(t, q.answers.Scan(), "QEMU greets")
	q.ask(`{"execute": "qmp_capabilities"}`)
	return q
}

func (n *Node) addressOf(t *testing.T, pod string) string {
	t.Helper()
	return n.Kubectl(t, "get", "pod", pod, "-o", "jsonpath={.status.podIP}")
}

// dial connects to an address in the network of the node.
func (n *Node) dial(t *testing.T, address string) (net.Conn, error) {
	t.Helper()
	// The thread goes back to its own network. If it ended, the nodes that it started would, too.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := testtool.Must(os.Open("/proc/thread-self/ns/net"))(t)
	defer own.Close()
	its := testtool.Must(os.Open(fmt.Sprintf("/proc/%d/ns/net", n.pid)))(t)
	defer its.Close()
	require.NoError(t, unix.Setns(int(its.Fd()), unix.CLONE_NEWNET))
	conn, err := net.DialTimeout("tcp", address, 5*time.Second)
	if err := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); err != nil {
		panic(err)
	}
	return conn, err
}

// monitor controls a QEMU.
type monitor struct {
	t       *testing.T
	conn    net.Conn
	answers *bufio.Scanner
}

// ask sends a command and returns its answer.
func (q *monitor) ask(format string, args ...any) map[string]any {
	q.t.Helper()
	require.NoError(q.t, q.conn.SetDeadline(time.Now().Add(timeout)))
	require.NoError(q.t, testtool.Err(fmt.Fprintf(q.conn, format+"\n", args...)))
	for q.answers.Scan() {
		var answer struct {
			Return map[string]any
			Error  map[string]any
			Event  string
		}
		require.NoError(q.t, json.Unmarshal(q.answers.Bytes(), &answer))
		if answer.Event != "" {
			continue
		}
		require.Empty(q.t, answer.Error, format)
		return answer.Return
	}
	require.Fail(q.t, "QEMU is gone", "%s: %v", format, q.answers.Err())
	return nil
}
