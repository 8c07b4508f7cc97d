package identities

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// launcher is the pod in which KubeVirt runs a machine with two hook sidecars.
func (w *world) launcher(name string, annotations map[string]string) *corev1.Pod {
	pod := plane.Pod(w.ns, "virt-launcher-"+name, annotations, "compute", "hook-sidecar-0",
		"hook-sidecar-1")
	pod.Labels = map[string]string{"kubevirt.io": "virt-launcher"}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1",
		Kind: "VirtualMachineInstance", Name: name, UID: "u", Controller: new(true)}}
	return pod
}

// TestMachineWithTwoDisks: the API server gives a machine of KubeVirt a disk in its pod and one
// behind a Service, and the controller lets it start when both are ready.
func TestMachineWithTwoDisks(t *testing.T) {
	w := newWorld(t)
	w.set(func(*v1alpha1.DiskSpec) {})
	service := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "service"},
		Spec: v1alpha1.DiskSpec{Image: image, Attachment: v1alpha1.Service}}
	w.make(service)
	pod := w.launcher("m", map[string]string{v1alpha1.AnnotationSet: "set",
		v1alpha1.AnnotationSet + ".1": "service"})
	w.make(pod)
	gates := func() (all []string) {
		p := &corev1.Pod{}
		require.True(t, w.get(pod.Name, p))
		for _, g := range p.Spec.SchedulingGates {
			all = append(all, g.Name)
		}
		return all
	}
	w.until("the first disk is there", func() bool { return len(gates()) == 1 })
	require.Equal(t, []string{v1alpha1.Gate + ".1"}, gates())
	// There is no node, so nothing runs the server of the other one.
	w.until("the other one is served", func() bool {
		var servers corev1.PodList
		require.NoError(t, w.Client.List(t.Context(), &servers, client.InNamespace(w.ns),
			client.MatchingLabels{v1alpha1.LabelServer: "m-1"}))
		if len(servers.Items) == 0 {
			return false
		}
		server := &servers.Items[0]
		server.Status.Conditions = append(server.Status.Conditions, corev1.PodCondition{
			Type: corev1.PodReady, Status: corev1.ConditionTrue})
		return w.Client.Status().Update(t.Context(), server) == nil
	})
	w.until("the machine starts", func() bool { return len(gates()) == 0 })
	got := &corev1.Pod{}
	require.True(t, w.get(pod.Name, got))
	require.Equal(t, v1alpha1.DiskURI("vmid-m-1."+w.ns+".svc"),
		got.Annotations[v1alpha1.AnnotationDisk+".1"])
	require.NotContains(t, got.Annotations, v1alpha1.AnnotationDisk)
	var claims []string
	for _, v := range got.Spec.Volumes {
		if v.PersistentVolumeClaim != nil {
			claims = append(claims, v.Name+" "+v.PersistentVolumeClaim.ClaimName)
		} else if v.Secret != nil {
			claims = append(claims, v.Name+" "+v.Secret.SecretName)
		}
	}
	require.ElementsMatch(t, []string{"disk-vda-data vmid-m", "disk-vda-nbd-1 vmnbd-m-1"}, claims)
}
