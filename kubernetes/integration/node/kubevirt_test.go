package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
	"kubevirt.io/disk/kubevirt/hookpb"
)

// machines is KubeVirt's type of machines, as far as Kubernetes looks at it.
const machines = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: virtualmachineinstances.kubevirt.io}
spec:
  group: kubevirt.io
  names: {kind: VirtualMachineInstance, plural: virtualmachineinstances, shortNames: [vmi]}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}
`

const (
	socketsVolume = "hook-sidecar-sockets"
	socketsDir    = "/var/run/kubevirt-hooks"
	diskSocket    = socketsDir + "/" + admission.HookContainer + "/disk/nbd.sock"
)

// TestKubeVirt runs pods of machines as virt-controller renders them, on a node with the
// controller, in a namespace with pod security restricted.
func TestKubeVirt(t *testing.T) {
	testtool.Need(t, "qemu-system-x86_64", "qemu-io")
	plane.Binaries(t, binaries...)
	linux := bootImage(t, "registry.example.com/vmdisks/linux:1")
	n := Start(t, DiskImage(t, serverImage, ""), QEMUImage(t, qemuImage), linux,
		ControllerImage(t, controllerImage))
	n.Kubectl(t, "label", "ns", "default", "pod-security.kubernetes.io/enforce=restricted")
	n.Apply(t, machines)
	n.installController(t)
	set := func(name string, attachment v1alpha1.Attachment) {
		size := resource.MustParse("1Gi") // larger than the image
		n.Apply(t, volume(t, n, "for-"+name, "ReadWriteOncePod"))
		n.applyObject(t, &v1alpha1.VMIdentitySet{
			TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(),
				Kind: "VMIdentitySet"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
			Spec: v1alpha1.DiskSpec{Size: &size, Attachment: attachment,
				Image: "registry.example.com/vmdisks/linux@" + n.digests[linux.Name]}})
	}
	set("stays", v1alpha1.Sidecar)
	t.Run("stays", n.machineThatStays)
	set("moves", v1alpha1.Service)
	t.Run("moves", n.machineThatMoves)
}

// machineThatStays has an annotation, which is all that asks for a disk: the hook sidecar then has
// claim and image. A guest boots from the hook's socket and writes. Its pod is deleted, and the pod
// of the machine's next start, which has another name, finds all of that.
func (n *Node) machineThatStays(t *testing.T) {
	pod := n.launcherPod(t, "fedora", "stays")
	t.Cleanup(func() { n.explain(t, pod.Name, "compute", admission.HookContainer) })
	n.startMachine(t, pod)
	domain := n.define(t, pod, "{}")
	require.Contains(t, domain, `socket="`+diskSocket+`"`)
	require.Contains(t, domain, `bus="scsi"`, "an annotation says so")
	wrote := n.untilWritten(t, pod.Name, 8)
	t.Logf("the hook sidecar's memory:\n%s", n.memory(t, pod.Name, 1))
	n.Kubectl(t, "delete", "pod", pod.Name)
	n.Kubectl(t, "delete", "vmi", "fedora")

	pod = n.launcherPod(t, "fedora", "stays")
	n.startMachine(t, pod)
	n.define(t, pod, "{}")
	end := n.compared(t, pod.Name)
	require.GreaterOrEqual(t, end, wrote*blockSize, "the first byte that nobody has written")
	require.Contains(t, n.Kubectl(t, "get", "vmid", "fedora"), "true")
	require.Equal(t, "", n.Kubectl(t, "get", "vmid", "-o",
		`jsonpath={.items[1:]}`), "one disk for both pods")
	// The guest has ended, and the launcher's Shutdown, which nobody sends here, ends the hook.
	n.Kubectl(t, "delete", "pod", pod.Name)
}

// launcherPod is the pod that virt-controller makes for a machine with a disk of a set, here with a
// machine that is QEMU alone. It waits for the disk's socket, as the launcher does for the hook's.
func (n *Node) launcherPod(t *testing.T, machine, set string) *corev1.Pod {
	t.Helper()
	n.Apply(t, "{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstance, metadata: {name: "+
		machine+"}}")
	uid := n.Kubectl(t, "get", "vmi", machine, "-o", "jsonpath={.metadata.uid}")
	yes, no, user := true, false, int64(107)
	restricted := func(add ...corev1.Capability) *corev1.SecurityContext {
		return &corev1.SecurityContext{RunAsUser: &user, RunAsGroup: &user, RunAsNonRoot: &yes,
			AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{
				Add: add, Drop: []corev1.Capability{"ALL"}}}
	}
	private := []corev1.EnvVar{{Name: "XDG_CACHE_HOME", Value: "/var/run/kubevirt-private"},
		{Name: "XDG_CONFIG_HOME", Value: "/var/run/kubevirt-private"},
		{Name: "XDG_RUNTIME_DIR", Value: "/var/run"}}
	memory := resource.MustParse("64Mi")
	pod := bootPod("virt-launcher-"+machine+"-"+uid[:5], "", "")
	pod.Labels = map[string]string{"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": uid,
		"vm.kubevirt.io/name": machine}
	pod.Annotations = map[string]string{"kubevirt.io/domain": machine,
		"kubectl.kubernetes.io/default-container": "compute",
		"kubevirt.io/migrationTransportUnix":      "true",
		"hooks.kubevirt.io/hookSidecars":          `[{"image": "` + serverImage + `"}]`,
		v1alpha1.AnnotationSet:                    set, v1alpha1.Group + "/bus": "scsi"}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1",
		Kind: "VirtualMachineInstance", Name: machine, UID: types.UID(uid), Controller: &yes,
		BlockOwnerDeletion: &yes}}
	pod.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &user, RunAsUser: &user,
		RunAsGroup: &user, RunAsNonRoot: &yes, SeccompProfile: &corev1.SeccompProfile{
			Type: corev1.SeccompProfileTypeRuntimeDefault}}
	pod.Spec.EnableServiceLinks, pod.Spec.AutomountServiceAccountToken = &no, &no
	compute := &pod.Spec.Containers[0]
	compute.Name, compute.Env, compute.SecurityContext = "compute", private,
		restricted("NET_BIND_SERVICE")
	for i, arg := range compute.Args {
		if strings.HasPrefix(arg, "driver=iscsi,") {
			compute.Args[i] = "driver=nbd,node-name=disk,export=1,open-timeout=240," +
				"cache.direct=on,server.type=unix,server.path=" + diskSocket
			// Without the credential.
			compute.Args = append(compute.Args[:i-3], compute.Args[i-1:]...)
			break
		}
	}
	compute.VolumeMounts = []corev1.VolumeMount{{Name: socketsVolume, MountPath: socketsDir}}
	pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
		Name: admission.HookContainer, Image: serverImage, SecurityContext: restricted(),
		Env: append(private, corev1.EnvVar{Name: "CONTAINER_NAME", Value: admission.HookContainer}),
		Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{corev1.ResourceMemory: memory}},
		VolumeMounts: []corev1.VolumeMount{{Name: socketsVolume, MountPath: socketsDir,
			SubPath: admission.HookContainer}}})
	pod.Spec.Volumes = []corev1.Volume{{Name: socketsVolume,
		VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	return pod
}

// define waits for the hook's socket where the launcher looks for it, and has the hook put its disk
// into a domain. The machine has the annotations of its pod; status is its own, as JSON.
func (n *Node) define(t *testing.T, pod *corev1.Pod, status string) string {
	t.Helper()
	uid := n.Kubectl(t, "get", "pod", pod.Name, "-o", "jsonpath={.metadata.uid}")
	path := filepath.Join(n.Dir, "kubelet/pods", uid, "volumes/kubernetes.io~empty-dir",
		socketsVolume, admission.HookContainer, admission.HookContainer+".sock")
	n.until(t, "the hook answers", func() bool {
		c, err := socket.DialUnix(t.Context(), path)
		return err == nil && c.Close() == nil
	})
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return socket.DialUnix(ctx, path)
		}}
	defer transport.CloseIdleConnections()
	annotations := testtool.Must(json.Marshal(pod.Annotations))(t)
	vmi := fmt.Sprintf(`{"metadata": {"annotations": %s}, "status": %s}`, annotations, status)
	answer := testtool.Must(connect.NewClient[hookpb.DomainParams, hookpb.DomainResult](
		&http.Client{Transport: transport},
		"http://hook/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain", connect.WithGRPC()).
		CallUnary(t.Context(), connect.NewRequest(&hookpb.DomainParams{Vmi: []byte(vmi),
			DomainXml: []byte("<domain type='kvm'><devices></devices></domain>")})))(t)
	return string(answer.Msg.DomainXml)
}

// memory is what containerd says of a container's memory.
func (n *Node) memory(t *testing.T, pod string, container int) string {
	t.Helper()
	name := n.Kubectl(t, "get", "pod", pod, "-o", "jsonpath={.spec.containers["+
		string(rune('0'+container))+"].name}")
	id := n.Kubectl(t, "get", "pod", pod, "-o", `jsonpath={.status.containerStatuses[?(@.name=="`+
		name+`")].containerID}`)
	out, err := n.Command(t.Context(), "ctr", "-n", "k8s.io", "tasks", "metrics",
		strings.TrimPrefix(id, "containerd://")).CombinedOutput()
	require.NoError(t, err, string(out))
	return string(out)
}

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
