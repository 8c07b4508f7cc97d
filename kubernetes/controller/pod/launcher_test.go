package pod

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
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
			{Name: admission.HookContainer}}},
	}
	for i, s := range further {
		p.Annotations[v1alpha1.Numbered(v1alpha1.AnnotationSet, i+1)] = s.Name
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
			Name: fmt.Sprintf("hook-sidecar-%d", i+1)})
	}
	maps.Copy(p.Annotations, annotations)
	var disks []admission.Wanted
	for _, d := range admission.Disks(p) {
		sets := append([]*v1alpha1.VMIdentitySet{set}, further...)
		i := slices.IndexFunc(sets, func(s *v1alpha1.VMIdentitySet) bool {
			return s.Name == d.SetName
		})
		disks = append(disks, admission.Wanted{Disk: d, Set: sets[i]})
	}
	require.NoError(t, admission.Pod(p, "", disks))
	return p
}

// TestLauncherThatDiffers: what the hook sidecar was given has to be what the disk was made of.
func TestLauncherThatDiffers(t *testing.T) {
	snapshot := newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Population = v1alpha1.Snapshot })
	for reasons, p := range map[string]*corev1.Pod{
		"False ImageDiffers": launcherPod(t, "b",
			newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Image = image2 })),
		"False SetDiffers": launcherPod(t, "b", snapshot),
	} {
		w, work := settled(t, newSet(), launcherPod(t, "a", newSet()))
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

// served lets the disk of an identity be served.
func served(t *testing.T, w *controllertest.World, name string) {
	t.Helper()
	id := identityOf(t, w, name)
	id.Status.Portal = "vmid-" + name + ".test.svc:3260"
	meta.SetStatusCondition(&id.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionServed, Status: metav1.ConditionTrue,
		Reason: v1alpha1.ReasonServing})
	require.NoError(t, w.Base.Status().Update(t.Context(), id))
}

// targetOf is a pod that KubeVirt has made to move machine `vm` into, for a migration.
func targetOf(t *testing.T, name, migration string, set *v1alpha1.VMIdentitySet) *corev1.Pod {
	t.Helper()
	p := launcherPod(t, name, set)
	p.Labels["kubevirt.io/migrationJobUID"] = migration
	return p
}

func behindService(s *v1alpha1.VMIdentitySet) { s.Spec.Attachment = v1alpha1.Service }

// TestLauncherOfAService: a machine whose disk is served elsewhere waits for its server, and is
// told where it is. So is the pod that the machine moves into, while the first one runs.
func TestLauncherOfAService(t *testing.T) {
	set := newSet(behindService)
	w, work := settled(t, set, launcherPod(t, "a", set), targetOf(t, "b", "m", set))
	require.True(t, gated(t, w, "a"))
	require.Contains(t, w.Events(), "Normal Starting")
	served(t, w, "vm")
	w.Settle(t, work, "vm")
	for _, name := range []string{"a", "b"} {
		require.False(t, gated(t, w, name), name)
		p, _ := get(t, w, name, &corev1.Pod{})
		require.Equal(t, "nbds://vmid-vm.test.svc:10809/1", p.Annotations[v1alpha1.AnnotationDisk])
	}
	require.Equal(t, "a", identityOf(t, w, "vm").Status.UsedBy.Name)
	require.Equal(t, "b", identityOf(t, w, "vm").Status.MigratesTo.Name)
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "vm")
	require.Equal(t, "b", identityOf(t, w, "vm").Status.UsedBy.Name)
	require.Nil(t, identityOf(t, w, "vm").Status.MigratesTo)

	// It moves on, and this time the pod that it should move into ends.
	for _, name := range []string{"c", "d"} {
		w.Make(t, targetOf(t, name, "of "+name, set))
		w.Settle(t, work, "vm")
		require.False(t, gated(t, w, name), name)
		require.Equal(t, name, identityOf(t, w, "vm").Status.MigratesTo.Name)
		remove(t, w, named(&corev1.Pod{}, name))
		w.Settle(t, work, "vm")
		require.Nil(t, identityOf(t, w, "vm").Status.MigratesTo)
		require.Equal(t, "b", identityOf(t, w, "vm").Status.UsedBy.Name)
	}
}

// TestAttachmentThatChanges: a machine that waits for its disk to be served is not told an address
// before there is one. Condition Ready is of the disk as it was.
func TestAttachmentThatChanges(t *testing.T) {
	set := newSet(behindService)
	id := newIdentity(types.NamespacedName{Namespace: "test", Name: "vm"}, newSet())
	w, work := settled(t, set, launcherPod(t, "a", set), id)
	id = identityOf(t, w, "vm")
	require.True(t, id.Status.Ready)
	id.Spec.Attachment = v1alpha1.Service
	require.NoError(t, w.Base.Update(t.Context(), id))
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "a"))
	served(t, w, "vm")
	w.Settle(t, work, "vm")
	p, _ := get(t, w, "a", &corev1.Pod{})
	require.False(t, gated(t, w, "a"))
	require.Equal(t, "nbds://vmid-vm.test.svc:10809/1", p.Annotations[v1alpha1.AnnotationDisk])
}

// TestOneMachineOfAService: no second pod starts with a served disk, unless KubeVirt moves the
// machine that has it there. It starts when the first has ended.
func TestOneMachineOfAService(t *testing.T) {
	set := newSet(behindService)
	plain := func(name string) *corev1.Pod {
		p := gatedPod(name, "vm")
		p.Spec.InitContainers, p.Spec.Volumes = nil, nil
		return p
	}
	another := targetOf(t, "b", "m", set) // of a machine that was made anew under its name
	another.OwnerReferences[0].UID = "another"
	nobody := targetOf(t, "b", "m", set)
	nobody.OwnerReferences[0].Name, nobody.OwnerReferences[0].UID = "other", "another"
	running := targetOf(t, "a", "m", set)
	for what, pods := range map[string][2]*corev1.Pod{
		"two plain pods":              {plain("a"), plain("b")},
		"a plain pod and a launcher":  {plain("a"), targetOf(t, "b", "m", set)},
		"a launcher and a plain pod":  {launcherPod(t, "a", set), plain("b")},
		"no migration":                {launcherPod(t, "a", set), launcherPod(t, "b", set)},
		"a migration without a UID":   {launcherPod(t, "a", set), targetOf(t, "b", "", set)},
		"a machine of the same name":  {launcherPod(t, "a", set), another},
		"another machine":             {launcherPod(t, "a", set), nobody},
		"the migration that is over":  {running, targetOf(t, "b", "m", set)},
		"a pod that was given a name": {plain("a"), launcherPod(t, "b", set)},
	} {
		w, work := settled(t, set.DeepCopy(), pods[0], pods[1])
		served(t, w, "vm")
		w.Settle(t, work, "vm")
		require.False(t, gated(t, w, "a"), what)
		require.True(t, gated(t, w, "b"), what)
		require.Contains(t, w.Events(), "Normal InUse", what)
		id := identityOf(t, w, "vm")
		require.Equal(t, "a", id.Status.UsedBy.Name, what)
		require.Nil(t, id.Status.MigratesTo, what)
		require.Contains(t, meta.FindStatusCondition(id.Status.Conditions,
			v1alpha1.ConditionInUse).Message, "pod b waits: pod a uses the disk", what)
		remove(t, w, named(&corev1.Pod{}, "a"))
		w.Settle(t, work, "vm")
		require.False(t, gated(t, w, "b"), what)
	}
}

// TestOneTarget: one pod at a time is beside that which has the disk, also if the cache does not
// know yet that it has started, or the controller was restarted since.
func TestOneTarget(t *testing.T) {
	set := newSet(behindService)
	w, work := settled(t, set, launcherPod(t, "a", set), targetOf(t, "b", "m", set))
	served(t, w, "vm")
	before := &corev1.PodList{} // both are at their gates
	require.NoError(t, w.Base.List(t.Context(), before))
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "b"))
	third := targetOf(t, "c", "another", set)
	w.Make(t, third)
	before.Items = append(before.Items, *third)
	for range 2 { // a controller that was restarted
		r := work()[0].(*Reconciler)
		r.Client = lateCache{w.Client, before}
		_, _ = controllertest.Once(t, r, "vm")
	}
	require.True(t, gated(t, w, "c"))
	w.Settle(t, work, "vm")
	require.True(t, gated(t, w, "c"))
	require.Equal(t, "b", identityOf(t, w, "vm").Status.MigratesTo.Name)
}
