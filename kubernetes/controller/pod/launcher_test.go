package pod

import (
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/inject"
)

// launcherPod is a pod in which KubeVirt runs machine `vm`, as admission leaves it. Further sets
// are those of further disks.
func launcherPod(t *testing.T, name string, set *v1alpha1.VMIdentitySet,
	further ...*v1alpha1.VMIdentitySet) *corev1.Pod {
	t.Helper()
	return launcherOf(t, name, nil, set, further...)
}

// launcherOf is such a pod with annotations.
func launcherOf(t *testing.T, name string, annotations map[string]string,
	set *v1alpha1.VMIdentitySet, further ...*v1alpha1.VMIdentitySet) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels:      map[string]string{"kubevirt.io": "virt-launcher"},
			Annotations: map[string]string{v1alpha1.AnnotationSet: set.Name},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Name: "vm",
				Kind: "VirtualMachineInstance", UID: "vmi", Controller: new(true)}}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "compute"},
			{Name: inject.HookContainer}}},
	}
	for i, s := range further {
		p.Annotations[v1alpha1.Numbered(v1alpha1.AnnotationSet, i+1)] = s.Name
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
			Name: fmt.Sprintf("hook-sidecar-%d", i+1)})
	}
	maps.Copy(p.Annotations, annotations)
	require.NoError(t, inject.Pod(p, inject.Options{}, append(further, set)...))
	return p
}

// TestLauncher: the disk of a machine of KubeVirt stays when its pod goes, and is for one pod at a
// time.
func TestLauncher(t *testing.T) {
	size := resource.MustParse("2Gi")
	set := newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Size = &size })
	w := newWorld(t, set, launcherPod(t, "virt-launcher-vm-a", set),
		launcherPod(t, "virt-launcher-vm-b", set))
	work := restart(w)
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "virt-launcher-vm-a"))
	require.True(t, gated(t, w, "virt-launcher-vm-b"))
	a, _ := get(t, w, "virt-launcher-vm-a", &corev1.Pod{})
	require.Equal(t, "2147483648", a.Annotations[v1alpha1.AnnotationSize])
	uid := identityOf(t, w, "vm").UID
	remove(t, w, named(&corev1.Pod{}, "virt-launcher-vm-a"))
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "virt-launcher-vm-b"))
	require.Equal(t, uid, identityOf(t, w, "vm").UID)
	require.Equal(t, 1, w.Made("PersistentVolumeClaim"))
}

// TestLauncherThatDiffers: what the hook sidecar was given has to be what the disk was made of.
func TestLauncherThatDiffers(t *testing.T) {
	snapshot := newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Population = v1alpha1.Snapshot })
	for reasons, p := range map[string]*corev1.Pod{
		"False ImageDiffers": launcherPod(t, "b",
			newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Image = image2 })),
		"False SetDiffers": launcherPod(t, "b", snapshot),
	} {
		w := newWorld(t, newSet(), launcherPod(t, "a", newSet()))
		work := restart(w)
		w.Settle(t, work, "vm")
		require.False(t, gated(t, w, "a"))
		remove(t, w, named(&corev1.Pod{}, "a"))
		w.Make(t, p)
		w.Settle(t, work, "vm")
		require.True(t, gated(t, w, "b"), reasons)
		require.Equal(t, reasons, reason(identityOf(t, w, "vm"), v1alpha1.ConditionInUse))
	}
}

// TestLaunchersOfAFixedUUID: KubeVirt's machines have UUIDs of their own, so none waits for that of
// the set.
func TestLaunchersOfAFixedUUID(t *testing.T) {
	set := newSet(fixedUUID)
	other := launcherPod(t, "b", set)
	other.Labels[v1alpha1.LabelIdentity] = "other"
	w := newWorld(t, set, launcherPod(t, "a", set), other)
	w.Settle(t, restart(w), "vm", "other")
	require.False(t, gated(t, w, "a"))
	require.False(t, gated(t, w, "b"))
	set, _ = get(t, w, "set", &v1alpha1.VMIdentitySet{})
	require.Nil(t, set.Status.UsedBy)
}

// TestLauncherOfAService: a machine whose disk is served elsewhere waits for its server, and is
// told where it is. So is the pod that the machine moves into, while the first one runs.
func TestLauncherOfAService(t *testing.T) {
	set := newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Attachment = v1alpha1.Service })
	target := launcherPod(t, "b", set)
	target.Labels["kubevirt.io/migrationJobUID"] = "m"
	w := newWorld(t, set, launcherPod(t, "a", set), target)
	work := restart(w)
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "a"))
	require.Contains(t, w.Events(), "Normal Starting")
	id := identityOf(t, w, "vm")
	id.Status.Portal = "vmid-vm.test.svc:3260"
	meta.SetStatusCondition(&id.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionServed, Status: metav1.ConditionTrue,
		Reason: v1alpha1.ReasonServing})
	require.NoError(t, w.Base.Status().Update(t.Context(), id))
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "a"), "there are no certificates")
	require.Equal(t, "False SecretMissing", reason(identityOf(t, w, "vm"), v1alpha1.ConditionInUse))
	w.Make(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NBDSecretName("vm")}})
	w.Settle(t, work, "vm")
	for _, name := range []string{"a", "b"} {
		require.False(t, gated(t, w, name), name)
		p, _ := get(t, w, name, &corev1.Pod{})
		require.Equal(t, "nbds://vmid-vm.test.svc:10809/1", p.Annotations[v1alpha1.AnnotationDisk])
	}
	require.Equal(t, "a", identityOf(t, w, "vm").Status.UsedBy.Name)
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "vm")
	require.Equal(t, "b", identityOf(t, w, "vm").Status.UsedBy.Name)
}
