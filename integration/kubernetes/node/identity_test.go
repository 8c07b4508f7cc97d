package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/integration/kubernetes/plane"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/inject"
)

const (
	// As the manifest names them.
	serverImage     = "docker.io/library/kubevirt.io:disk"
	controllerImage = "docker.io/library/kubevirt.io:disk-controller"
)

// TestIdentity installs the controller on a real node. A pod with an identity writes to its disk by
// QEMU's initiator, is deleted and made again, and finds what it wrote, above an image that comes
// as an image volume.
func TestIdentity(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-io", "qemu-system-x86_64")
	plane.Binaries(t, binaries...)
	disk := filepath.Join(t.TempDir(), "disk.raw")
	content := make([]byte, 64<<20)
	for i := range content[:1<<20] {
		content[i] = 3
	}
	require.NoError(t, os.WriteFile(disk, content, 0o644))
	n := Start(t, DiskImage(t, serverImage, ""), QEMUImage(t, "registry.example.com/qemu:1"),
		Image{Name: "registry.example.com/vmdisks/linux:1",
			Files: map[string]string{"/disk": filepath.Dir(disk)}},
		Image{Name: controllerImage, Files: map[string]string{
			"/kubevirt-disk-controller": Build(t, "./cmd/kubevirt-disk-controller")},
			Config: v1.Config{Entrypoint: []string{"/kubevirt-disk-controller"}, User: "65532"}})
	n.Kubectl(t, "label", "ns", "default", "pod-security.kubernetes.io/enforce=restricted")
	root, err := plane.Root()
	require.NoError(t, err)
	n.Kubectl(t, "apply", "--server-side", "-f",
		filepath.Join(root, "deploy/kubevirt-disk-controller.yaml"))
	const system = "kubevirt-disk-system"
	out, err := n.TryKubectl("", "rollout", "status", "deployment/kubevirt-disk-controller", "-n",
		system, "--timeout=5m")
	if err != nil {
		pods, _ := n.TryKubectl("", "describe", "pods", "-n", system)
		logs, _ := n.TryKubectl("", "logs", "deployment/kubevirt-disk-controller", "-n", system)
		t.Fatalf("%s\n%s\n%s", out, pods, logs)
	}

	n.Apply(t, volume(t, n, "pv0", "ReadWriteOncePod"))
	set := &v1alpha1.VMIdentitySet{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(),
			Kind: "VMIdentitySet"},
		ObjectMeta: metav1.ObjectMeta{Name: "linux", Namespace: "default"},
		Spec: v1alpha1.DiskSpec{Image: "registry.example.com/vmdisks/linux@" +
			n.digests["registry.example.com/vmdisks/linux:1"]}}
	n.applyObject(t, set)
	n.runMachine(t, set, "read -P 3 0 1M", "read -P 0 1M 1M", "write -P 7 1M 1M", "flush")
	n.Kubectl(t, "delete", "pod", "machine")
	n.runMachine(t, set, "read -P 3 0 1M", "read -P 7 1M 1M")
	require.Contains(t, n.Kubectl(t, "get", "vmid", "machine"), "true")
}

// runMachine runs a pod that does something with its disk, and ends. Admission gives it the disk.
func (n *Node) runMachine(t *testing.T, set *v1alpha1.VMIdentitySet, commands ...string) {
	t.Helper()
	yes, no := true, false
	user := int64(107)
	args := []string{"--object", "secret,id=chap,file=" + inject.CredentialDir +
		"/node.session.auth.password", "--image-opts", "driver=iscsi,transport=tcp," +
		"portal=127.0.0.1:3260,target=iqn.2017-01.io.kubevirt:disk.vda,lun=1," +
		"user=$(USERNAME),password-secret=chap,initiator-name=iqn.2017-01.io.kubevirt:vm"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "machine", Namespace: "default",
			Annotations: map[string]string{v1alpha1.AnnotationSet: set.Name}},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever,
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes,
				SeccompProfile: &corev1.SeccompProfile{
					Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{Name: "vm", Image: "registry.example.com/qemu:1",
				Command: []string{"qemu-io"}, Args: args,
				Env: []corev1.EnvVar{{Name: "USERNAME", ValueFrom: &corev1.EnvVarSource{
					SecretKeyRef: &corev1.SecretKeySelector{Key: "node.session.auth.username",
						LocalObjectReference: corev1.LocalObjectReference{
							Name: v1alpha1.SecretName("machine")}}}}},
				SecurityContext: &corev1.SecurityContext{RunAsUser: &user,
					AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{
						Drop: []corev1.Capability{"ALL"}}}}},
		}}
	data, err := json.Marshal(pod)
	require.NoError(t, err)
	n.until(t, "admission knows the set", func() bool {
		_, err := n.TryKubectl(string(data), "apply", "-f", "-")
		return err == nil
	})
	gated := n.Kubectl(t, "get", "pod", "machine", "-o", "jsonpath={.metadata.labels}")
	require.Contains(t, gated, v1alpha1.LabelIdentity, "admission gave the pod its disk")
	defer func() { n.explain(t, "machine", "vm") }()
	phase := ""
	n.until(t, "the pod has ended", func() bool {
		phase, _ = n.TryKubectl("", "get", "pod", "machine", "-o", "jsonpath={.status.phase}")
		return phase == "Succeeded" || phase == "Failed"
	})
	out := n.Kubectl(t, "logs", "machine", "-c", "vm")
	require.Equal(t, "Succeeded", phase, out)
	require.NotContains(t, out, "Pattern verification failed")
	require.Equal(t, len(commands)-strings.Count(strings.Join(commands, " "), "flush"),
		strings.Count(out, "bytes at offset"), out)
}

func (n *Node) applyObject(t *testing.T, object any) {
	t.Helper()
	data, err := json.Marshal(object)
	require.NoError(t, err)
	n.Apply(t, string(data))
}
