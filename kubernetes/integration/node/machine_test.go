package node

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const qemuImage = "registry.example.com/qemu:1"

// The disk that a machine boots from, and the place of its writes: behind the image's data. A block
// has a whole number of lines of writtenBlock, and of sectors.
const (
	imageSize  = 64 << 20
	blockLines = 8192
	blockSize  = blockLines * len("10000000\n")
	firstBlock = (imageSize + blockSize - 1) / blockSize
)

// work is the script of a machine. With an empty disk it writes one block after the other, each a
// part of one long sequence of numbers. It prints a line when a block is on the disk and was read
// again. With a written disk, it compares everything with the numbers, prints where they end, and
// switches itself off. Nobody has to talk to it.
var work = fmt.Sprintf(`
fail() {
	echo "machine: failed: $*"
	dmesg | tail -n 5
	poweroff -f
}
for i in $(seq 600); do test -b /dev/vda && break; sleep 0.1; done
echo "machine: booted, $(cat /sys/block/vda/size) sectors"
block=%d first=%d lines=%d
begin=$(dd if=/dev/vda bs=$block skip=$first count=1 2>/dev/null | head -c 8 | tr -d '\000')
if [ "$begin" = 10000000 ]; then
	mkfifo /tmp/numbers
	seq 10000000 99999999 >/tmp/numbers 2>/dev/null &
	dd if=/dev/vda bs=$block skip=$first 2>/tmp/error | cmp /tmp/numbers - >/tmp/end
	grep -q differ /tmp/end || fail "$(cat /tmp/end /tmp/error)"
	echo "machine: found $(cat /tmp/end)"
	poweroff -f
fi
i=0
while :; do
	at=$((10000000 + i * lines))
	seq $at $((at + lines - 1)) >/tmp/block
	dd if=/tmp/block of=/dev/vda bs=$block seek=$((first + i)) conv=notrunc,fsync 2>/tmp/error ||
		fail "$(cat /tmp/error)"
	echo 1 >/proc/sys/vm/drop_caches
	dd if=/dev/vda bs=$block skip=$((first + i)) count=1 2>/tmp/error | cmp - /tmp/block ||
		fail "what was read is not what was written: $(cat /tmp/error)"
	! dmesg | grep -iE 'I/O error|vda.*(error|fail)' || fail "the kernel complains"
	i=$((i + 1))
	echo "machine: written $i"
done
`, blockSize, firstBlock, blockLines)

// bootImage is a container image with a disk that boots by itself and does its work.
func bootImage(t *testing.T, name string) Image {
	t.Helper()
	testtool.Need(t, "apt-get", "dpkg-deb", "mke2fs")
	root := testtool.Must(plane.Root())(t)
	dir := t.TempDir()
	err := guest.BootDisk(filepath.Join(dir, "disk.raw"), imageSize, guest.Options{Init: work,
		Modules: []string{"virtio_blk"}, CacheDir: filepath.Join(root, "cache/guest")})
	guest.Made(t, err)
	return Image{Name: name, Files: map[string]string{"/disk": dir}}
}

// machinePod is a pod that asks for a disk of a set and boots a Linux guest from it.
func machinePod(name string, set *v1alpha1.VMIdentitySet) *corev1.Pod {
	pod := bootPod(name, v1alpha1.SecretName(name), "portal=127.0.0.1:3260,"+
		"target=iqn.2017-01.io.kubevirt:disk.vda,initiator-name=iqn.2017-01.io.kubevirt:"+name)
	pod.Namespace = set.Namespace
	pod.Annotations = map[string]string{v1alpha1.AnnotationSet: set.Name}
	return pod
}

// bootPod is a pod that boots a Linux guest from a LUN. The pod's own container runs this machine's
// QEMU, like a user's would: without KVM, which a pod gets only from a device plugin. QEMU logs in
// to the disk with its own initiator.
func bootPod(name, secret, lun string) *corev1.Pod {
	yes, no := true, false
	user := int64(107)
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever,
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes,
				SeccompProfile: &corev1.SeccompProfile{
					Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{Name: "vm", Image: qemuImage,
				Command: []string{"qemu-system-x86_64"},
				Args: []string{"-accel", "tcg", "-machine", "q35", "-cpu", "max", "-m",
					guest.MemorySize(256), "-nodefaults", "-no-user-config",
					"-display", "none", "-no-reboot", "-serial", "stdio",
					"-object", "secret,id=chap,file=" + admission.CredentialDir +
						"/node.session.auth.password",
					"-blockdev", "driver=iscsi,node-name=disk,transport=tcp,lun=1," +
						"cache.direct=on,user=$(USERNAME),password-secret=chap," + lun,
					"-device", "virtio-blk-pci,drive=disk,bootindex=1"},
				Env: []corev1.EnvVar{{Name: "USERNAME", ValueFrom: &corev1.EnvVarSource{
					SecretKeyRef: &corev1.SecretKeySelector{Key: "node.session.auth.username",
						LocalObjectReference: corev1.LocalObjectReference{Name: secret}}}}},
				SecurityContext: &corev1.SecurityContext{RunAsUser: &user,
					AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{
						Drop: []corev1.Capability{"ALL"}}}}},
		}}
}

// startMachine makes the pod of a machine. Admission gives it the disk.
func (n *Node) startMachine(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	data := testtool.Must(json.Marshal(pod))(t)
	n.until(t, "admission knows the set", func() bool {
		_, err := n.TryKubectl(string(data), "create", "-f", "-")
		return err == nil
	})
	labels := n.Kubectl(t, "get", "pod", pod.Name, "-o", "jsonpath={.metadata.labels}")
	require.Contains(t, labels, v1alpha1.LabelIdentity, "admission gave the pod its disk")
}

// written matches a machine's line about each block, and found its line about all of them.
var (
	written = regexp.MustCompile(`machine: written (\d+)`)
	found   = regexp.MustCompile(`machine: found .* differ: (?:char|byte) (\d+)`)
	failed  = regexp.MustCompile(`(?s)machine: failed: .*`)
)

// compared waits until a machine has compared its disk, and returns the first byte that nobody has
// written.
func (n *Node) compared(t *testing.T, pod string) (end int) {
	t.Helper()
	n.until(t, "the machine has compared the disk", func() bool {
		end = n.said(t, pod, found)
		return end >= 0
	})
	return end
}

// said returns the last number that a machine has printed in lines that match what, or -1. If the
// machine has failed, the test fails.
func (n *Node) said(t *testing.T, pod string, what *regexp.Regexp) int {
	t.Helper()
	out, err := n.TryKubectl("", "logs", pod) // of its first container
	if err != nil {
		return -1 // it has not begun yet
	}
	if complaint := failed.FindString(out); complaint != "" {
		t.Fatal(complaint)
	}
	all := what.FindAllStringSubmatch(out, -1)
	if len(all) == 0 {
		return -1
	}
	return testtool.Must(strconv.Atoi(all[len(all)-1][1]))(t)
}

// untilWritten waits until a machine has written this many blocks, and returns how many there are.
func (n *Node) untilWritten(t *testing.T, pod string, blocks int) (have int) {
	t.Helper()
	n.until(t, fmt.Sprintf("%s has written %d blocks", pod, blocks), func() bool {
		have = n.said(t, pod, written)
		return have >= blocks
	})
	return have
}
