package pod

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

const (
	image  = "registry.example.com/a@sha256:aa"
	image2 = "registry.example.com/a@sha256:bb"
	uuid1  = "1b4d298f-6151-40b0-a1d4-269fc41d48f0"
)

func newSet(change ...func(*v1alpha1.VMIdentitySet)) *v1alpha1.VMIdentitySet {
	s := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"},
		Spec: v1alpha1.DiskSpec{Image: image, Type: v1alpha1.PersistentVolume}}
	for _, f := range change {
		f(s)
	}
	return s
}

func fixedUUID(s *v1alpha1.VMIdentitySet) { s.Spec.FirmwareUUID = uuid1 }

// gatedPod makes a pod as admission leaves it.
func gatedPod(name, id string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels:      map[string]string{v1alpha1.LabelIdentity: id, v1alpha1.LabelSet: "set"},
			Annotations: map[string]string{v1alpha1.AnnotationSet: "set"}},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: v1alpha1.Gate}},
			InitContainers: []corev1.Container{{Name: v1alpha1.DiskContainer,
				VolumeMounts: []corev1.VolumeMount{{Name: "image", MountPath: "/disk"}}}},
			Volumes: []corev1.Volume{{Name: "image", VolumeSource: corev1.VolumeSource{
				Image: &corev1.ImageVolumeSource{Reference: image}}}}},
	}
}

func newWorld(t testing.TB, all ...client.Object) *controllertest.World {
	t.Helper()
	return controllertest.New(t, []controllertest.Index{
		{Object: &corev1.Pod{}, Field: objects.IndexIdentity, Of: objects.ByIdentity},
		{Object: &corev1.Pod{}, Field: indexWaiting, Of: byWaiting}},
		append(all, controllertest.DefaultClass())...)
}

// restart makes the controllers anew, as a new process does.
func restart(w *controllertest.World) func() []controllertest.Reconciler {
	return func() []controllertest.Reconciler {
		kit := objects.Kit{Client: w.Client, Live: w.Live, Events: w,
			Options: objects.Options{ClaimSize: resource.MustParse("20Gi")}}
		return []controllertest.Reconciler{&Reconciler{Kit: kit}, &identity.Reconciler{Kit: kit}}
	}
}

// settled is a world in which all is done for VMIdentity `vm`, and what makes the controllers anew.
func settled(t testing.TB, all ...client.Object) (*controllertest.World,
	func() []controllertest.Reconciler) {
	t.Helper()
	w := newWorld(t, all...)
	work := restart(w)
	w.Settle(t, work, "vm")
	return w, work
}

func get[T client.Object](t testing.TB, w *controllertest.World, name string, o T) (T, bool) {
	t.Helper()
	return o, controllertest.There(t, w.Base, controllertest.Namespace, name, o)
}

func identityOf(t testing.TB, w *controllertest.World, name string) *v1alpha1.VMIdentity {
	t.Helper()
	return controllertest.Get(t, w.Base, controllertest.Namespace, name, &v1alpha1.VMIdentity{})
}

func gated(t testing.TB, w *controllertest.World, name string) bool {
	t.Helper()
	p, ok := get(t, w, name, &corev1.Pod{})
	require.True(t, ok, "pod %s", name)
	return objects.Gated(p, p.Labels[v1alpha1.LabelIdentity])
}

func remove(t testing.TB, w *controllertest.World, o client.Object) {
	t.Helper()
	o.SetNamespace("test")
	require.NoError(t, w.Base.Delete(t.Context(), o))
}

func named[T client.Object](o T, name string) T {
	o.SetName(name)
	return o
}

// story is the life of one identity with two pods that want it. After every write it checks what
// must always hold.
func story(t *testing.T, w *controllertest.World, kind func(*v1alpha1.VMIdentitySet)) {
	work := restart(w)
	w.Make(t, newSet(kind))
	w.Make(t, gatedPod("one", "vm"))
	w.Make(t, gatedPod("two", "vm"))
	var claim *corev1.PersistentVolumeClaim
	w.Check = func() {
		running := 0
		for _, name := range []string{"one", "two"} {
			if p, ok := get(t, w, name, &corev1.Pod{}); ok && !objects.Gated(p, "vm") {
				running++
				now, ok := get(t, w, "vmid-vm", &corev1.PersistentVolumeClaim{})
				require.True(t, ok, "a pod runs without its claim")
				require.Zero(t, now.DeletionTimestamp, "a claim in use is deleted")
				require.True(t, claim == nil || claim.UID == now.UID, "another claim")
				claim = now
			}
		}
		require.LessOrEqual(t, running, 1, "two pods use one disk")
	}
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "one"))
	require.True(t, gated(t, w, "two"))
	id := identityOf(t, w, "vm")
	require.Equal(t, "one", id.Status.UsedBy.Name)
	require.NotNil(t, id.Status.CreationTime)
	require.Equal(t, "vmid-vm", id.Status.SecretName)

	remove(t, w, named(&corev1.Pod{}, "one"))
	w.Settle(t, work, "vm")
	require.False(t, gated(t, w, "two"))
	require.Equal(t, "two", identityOf(t, w, "vm").Status.UsedBy.Name)

	remove(t, w, named(&v1alpha1.VMIdentity{}, "vm"))
	w.Settle(t, work, "vm")
	ready := meta.FindStatusCondition(identityOf(t, w, "vm").Status.Conditions, "Ready")
	require.Equal(t, v1alpha1.ReasonDeleting, ready.Reason)
	require.Contains(t, ready.Message, "pod two uses the disk")

	remove(t, w, named(&corev1.Pod{}, "two"))
	w.Settle(t, work, "vm")
	for _, o := range []client.Object{&v1alpha1.VMIdentity{}, &corev1.Secret{},
		&corev1.PersistentVolumeClaim{}} {
		for _, name := range []string{"vm", "vmid-vm"} {
			_, there := get(t, w, name, o)
			require.False(t, there, "%T %s", o, name)
		}
	}
	require.Equal(t, []int{1, 1, 1}, []int{w.Made("VMIdentity"), w.Made("Secret"),
		w.Made("PersistentVolumeClaim")})
}

// Each request of the whole story fails once, and the process then starts anew. The end is the same
// as without the failure. The UUID is fixed because that takes one more step.
func TestEveryRequestFailsOnce(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t)
		w.Calls = calls
		story(t, w, fixedUUID)
		require.Greater(t, calls.Reads+calls.Writes, 30)
	})
}

// A settled state is left alone.
func TestSteadyStateWritesNothing(t *testing.T) {
	w, work := settled(t, newSet(fixedUUID), gatedPod("one", "vm"), gatedPod("two", "vm"))
	before := w.Writes()
	w.Settle(t, work, "vm")
	w.Settle(t, work, "vm")
	require.Equal(t, before, w.Writes())
	// The identity, its claim and secret, its status twice, the set's UUID, and the gate. One more
	// write says that a second pod waits.
	require.LessOrEqual(t, before, 9)
}

// If somebody writes between a controller's read and its write, that is a conflict, and no pod
// starts because of an outdated state.
func TestConflictsAtEachWrite(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		at, done := 0, false
		w.Refuse = func(verb string, o any) error {
			id, ok := o.(*v1alpha1.VMIdentity)
			if !ok || verb != "patch status" {
				return nil
			}
			if at++; at == n {
				done = true
				now := identityOf(t, w, id.Name)
				now.Annotations = map[string]string{"by": "somebody else"}
				return w.Base.Update(t.Context(), now)
			}
			return nil
		}
		story(t, w, func(*v1alpha1.VMIdentitySet) {})
		if !done {
			require.Greater(t, n, 4)
			return
		}
	}
}

// TestSetMatters checks which events of a set wake the pods that wait for it. TestWakeUps checks
// what the pods do then.
func TestSetMatters(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v1alpha1.VMIdentitySet)
		want   bool
	}{
		"another spec": {func(s *v1alpha1.VMIdentitySet) { s.Generation++ }, true},
		// It was deleted and made again while the watch was lost.
		"another set": {func(s *v1alpha1.VMIdentitySet) { s.UID = "2" }, true},
		"free":        {func(s *v1alpha1.VMIdentitySet) { s.Status.UsedBy = nil }, true},
		"used":        {func(s *v1alpha1.VMIdentitySet) { s.Status.UsedBy.UID = "b" }, true},
		"counted": {func(s *v1alpha1.VMIdentitySet) {
			s.Status.Identities, s.Status.ReadyIdentities = 2, 1
		}, false},
		"looked at again": {func(*v1alpha1.VMIdentitySet) {}, false},
	} {
		before := newSet()
		before.UID, before.Generation = "1", 1
		before.Status.UsedBy = &corev1.ObjectReference{Name: "one", UID: "a"}
		after := before.DeepCopy()
		c.change(after)
		got := setMatters().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after})
		require.Equal(t, c.want, got, name)
	}
	require.True(t, setMatters().Create(event.CreateEvent{Object: newSet()}))
	require.True(t, setMatters().Delete(event.DeleteEvent{Object: newSet()}))
}

// TestWaitingFor: a set wakes exactly the pods that are at their gate and name it.
func TestWaitingFor(t *testing.T) {
	set := newSet()
	started, other := gatedPod("started", "b"), gatedPod("other", "c")
	started.Spec.SchedulingGates = nil
	other.Annotations[v1alpha1.AnnotationSet] = "other"
	w := newWorld(t, set, gatedPod("waits", "a"), started, other)
	var names []types.NamespacedName
	r := &Reconciler{Kit: objects.Kit{Client: w.Client}}
	for _, request := range r.waitingFor(t.Context(), set) {
		names = append(names, request.NamespacedName)
	}
	require.Equal(t, []types.NamespacedName{{Namespace: "test", Name: "a"}}, names)
}

// lateCache is a cache that never hears of a change of a pod.
type lateCache struct {
	client.Client
	pods *corev1.PodList
}

func (c lateCache) List(ctx context.Context, l client.ObjectList, o ...client.ListOption) error {
	if pods, ok := l.(*corev1.PodList); ok {
		c.pods.DeepCopyInto(pods)
		return nil
	}
	return c.Client.List(ctx, l, o...)
}

// TestCacheIsLate: a pod that the cache still has at its gate is not let through again, because
// that would fail.
func TestCacheIsLate(t *testing.T) {
	w := newWorld(t, newSet(), gatedPod("a", "vm"))
	pods := &corev1.PodList{}
	require.NoError(t, w.Base.List(t.Context(), pods))
	all := restart(w)()
	r := all[0].(*Reconciler)
	r.Client = lateCache{w.Client, pods}
	w.Settle(t, func() []controllertest.Reconciler { return all }, "vm")
	require.False(t, gated(t, w, "a"))
	writes := w.Writes()
	require.NoError(t, testtool.Err(controllertest.Once(t, r, "vm")))
	require.Equal(t, writes, w.Writes())
}
