package pod

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// gates are the names of the gates of a pod.
func gates(t *testing.T, w *controllertest.World, name string) (all []string) {
	t.Helper()
	p, ok := get(t, w, name, &corev1.Pod{})
	require.True(t, ok, "pod %s", name)
	for _, g := range p.Spec.SchedulingGates {
		all = append(all, g.Name)
	}
	return all
}

// TestMachineWithTwoDisks: a machine starts when both its disks are there, one in its pod and one
// behind a Service. Each learns what is its own.
func TestMachineWithTwoDisks(t *testing.T) {
	one, two := resource.MustParse("1Gi"), resource.MustParse("2Gi")
	set := newSet(func(s *v1alpha1.VMIdentitySet) { s.Spec.Size = &one })
	service := newSet(func(s *v1alpha1.VMIdentitySet) {
		s.Name, s.Spec.Attachment, s.Spec.Size = "service", v1alpha1.Service, &two
		s.Spec.FirmwareUUID = uuid1
	})
	w := newWorld(t, set, service, launcherPod(t, "a", set, set, service))
	work := restart(w)
	w.Settle(t, work, "vm", "vm-1", "vm-2")
	require.Equal(t, []string{"disk.kubevirt.io/identity.2"}, gates(t, w, "a"))
	require.Equal(t, "service", identityOf(t, w, "vm-2").Spec.SetName)
	require.Equal(t, 3, w.Made("PersistentVolumeClaim"))
	served(t, w, "vm-2")
	w.Settle(t, work, "vm", "vm-1", "vm-2")
	require.Empty(t, gates(t, w, "a"))
	p, _ := get(t, w, "a", &corev1.Pod{})
	for annotation, want := range map[string]string{"size": "1073741824", "size.1": "1073741824",
		"size.2": "", "disk": "", "disk.1": "", "disk.2": "nbds://vmid-vm-2.test.svc:10809/1",
		"firmware-uuid": ""} {
		require.Equal(t, want, p.Annotations[v1alpha1.Group+"/"+annotation], annotation)
	}
	for _, name := range []string{"vm", "vm-1", "vm-2"} {
		require.Equal(t, p.UID, identityOf(t, w, name).Status.UsedBy.UID, name)
	}

	// A disk of a pod that runs is not deleted, whatever its number is.
	remove(t, w, named(&v1alpha1.VMIdentity{}, "vm-1"))
	w.Settle(t, work, "vm", "vm-1")
	identityOf(t, w, "vm-1")
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "vm", "vm-1", "vm-2")
	_, there := get(t, w, "vm-1", &v1alpha1.VMIdentity{})
	require.False(t, there)
	require.Nil(t, identityOf(t, w, "vm-2").Status.UsedBy)
}

// TestMachinesThatShareDisks: two machines that name the same two disks, in another order, do not
// hold one each and wait for the other.
func TestMachinesThatShareDisks(t *testing.T) {
	set := newSet()
	first, second := v1alpha1.AnnotationName, v1alpha1.Numbered(v1alpha1.AnnotationName, 1)
	w := newWorld(t, set, launcherOf(t, "a", map[string]string{first: "x", second: "y"}, set, set),
		launcherOf(t, "b", map[string]string{first: "y", second: "x"}, set, set))
	work := restart(w)
	w.Settle(t, work, "y")
	require.Len(t, gates(t, w, "a"), 2)
	require.Equal(t, "False Starting", reason(identityOf(t, w, "y"), v1alpha1.ConditionInUse))
	w.Settle(t, work, "y", "x")
	require.Empty(t, gates(t, w, "a"))
	require.Len(t, gates(t, w, "b"), 2)
	require.Equal(t, "a", identityOf(t, w, "x").Status.UsedBy.Name)
	require.Equal(t, "a", identityOf(t, w, "y").Status.UsedBy.Name)
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Settle(t, work, "y", "x")
	require.Empty(t, gates(t, w, "b"))
}

// TestFurtherDiskOfAnotherSet: what is wrong with one disk holds the pod, and the advice is about
// that disk.
func TestFurtherDiskOfAnotherSet(t *testing.T) {
	set := newSet()
	other := newSet(func(s *v1alpha1.VMIdentitySet) { s.Name = "other" })
	w := newWorld(t, set, other, launcherPod(t, "a", set, other))
	work := restart(w)
	w.Settle(t, work, "vm-1", "vm")
	require.Empty(t, gates(t, w, "a"))
	remove(t, w, named(&corev1.Pod{}, "a"))
	w.Make(t, launcherPod(t, "b", set, set))
	w.Settle(t, work, "vm-1", "vm")
	require.Equal(t, []string{"disk.kubevirt.io/identity.1"}, gates(t, w, "b"))
	id := identityOf(t, w, "vm-1")
	require.Equal(t, "False Invalid", reason(id, v1alpha1.ConditionInUse))
	require.Contains(t, meta.FindStatusCondition(id.Status.Conditions,
		v1alpha1.ConditionInUse).Message, "disk.kubevirt.io/identity-name.1 with another name")
}

// TestWhatAPodAsksFor: events, indexes and lists find a pod by each of its identities.
func TestWhatAPodAsksFor(t *testing.T) {
	set := newSet()
	other := newSet(func(s *v1alpha1.VMIdentitySet) { s.Name = "other" })
	p := launcherPod(t, "a", set, set, other)
	require.Equal(t, []string{"vm", "vm-1", "vm-2"}, objects.ByIdentity(p))
	require.Equal(t, []string{"set", "set", "other"}, byWaiting(p))
	require.Len(t, objects.Identities(t.Context(), p), 3)
	p.Spec.SchedulingGates = p.Spec.SchedulingGates[2:]
	require.Equal(t, []string{"other"}, byWaiting(p))
	require.False(t, objects.Gated(p, "vm-1"))
	require.True(t, objects.Gated(p, "vm-2"))
	w := newWorld(t, set, other, p, launcherPod(t, "b", set))
	for identity, want := range map[string]int{"vm": 2, "vm-2": 1, "vm-3": 0} {
		found := testtool.Must(objects.PodsOf(t.Context(), w.Client,
			&metav1.ObjectMeta{Namespace: controllertest.Namespace, Name: identity}))(t)
		require.Len(t, found, want, identity)
	}
}

// TestImageThatIsHeld: a pod waits while the image of its ready disk may not be used, whatever the
// status says.
func TestImageThatIsHeld(t *testing.T) {
	w := newWorld(t, newSet(), gatedPod("a", "vm"))
	refusing := controllertest.Refusing(v1alpha1.ReasonNotSigned)
	work := func() []controllertest.Reconciler {
		all := restart(w)()
		for _, r := range all {
			if pods, ok := r.(*Reconciler); ok {
				pods.Images = &refusing
			}
		}
		return all
	}
	w.Settle(t, work, "vm")
	require.True(t, identityOf(t, w, "vm").Status.Ready)
	require.True(t, gated(t, w, "a"))
	require.Contains(t, w.Events(), "Warning NotSigned")
	refusing = ""
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "a"))
}

// TestFollowedTag: a new identity begins from what the tag of its set names, and stays there when
// the tag moves: its next pod starts, as that of a new one does.
func TestFollowedTag(t *testing.T) {
	filled := func(name, id string) *corev1.Pod {
		p := gatedPod(name, id)
		p.Spec.Volumes, p.Spec.InitContainers[0].VolumeMounts = nil, nil
		return p
	}
	set := newSet(func(s *v1alpha1.VMIdentitySet) {
		s.Spec.Population = v1alpha1.Snapshot
		s.Spec.Follow = &v1alpha1.FollowSpec{Tag: "stable"}
	})
	w := newWorld(t, set, controllertest.Class("csi"))
	work := func() []controllertest.Reconciler {
		return []controllertest.Reconciler{restart(w)()[0]}
	}
	follow := func(image string) {
		set, _ := get(t, w, "set", &v1alpha1.VMIdentitySet{})
		set.Status.Followed = &v1alpha1.FollowedStatus{Tag: "stable", Image: image}
		require.NoError(t, w.Base.Status().Update(t.Context(), set))
	}
	start := func(pod, name string) *v1alpha1.VMIdentity {
		t.Helper()
		w.Make(t, filled(pod, name))
		w.Settle(t, work, name)
		id := identityOf(t, w, name)
		id.Status.Ready = true
		require.NoError(t, w.Base.Status().Update(t.Context(), id))
		w.Settle(t, work, name)
		require.False(t, gated(t, w, pod), pod)
		return identityOf(t, w, name)
	}
	follow("registry.example.com/a@sha256:cc")
	id := start("one", "vm")
	require.Equal(t, "registry.example.com/a@sha256:cc", id.Spec.Image)
	require.Equal(t, "stable", id.Spec.FollowedTag)
	require.Nil(t, id.Spec.Follow)
	follow("registry.example.com/a@sha256:dd")
	remove(t, w, named(&corev1.Pod{}, "one"))
	w.Settle(t, work, "vm")
	require.Equal(t, "registry.example.com/a@sha256:cc", start("two", "vm").Spec.Image)
	require.Equal(t, "registry.example.com/a@sha256:dd", start("other", "vm2").Spec.Image)

	// A set that follows nothing any more changes no disk either.
	set, _ = get(t, w, "set", &v1alpha1.VMIdentitySet{})
	set.Spec.Follow = nil
	require.NoError(t, w.Base.Update(t.Context(), set))
	remove(t, w, named(&corev1.Pod{}, "two"))
	w.Settle(t, work, "vm")
	require.Equal(t, "registry.example.com/a@sha256:cc", start("three", "vm").Spec.Image)
	require.Equal(t, image, start("last", "vm3").Spec.Image)
}
