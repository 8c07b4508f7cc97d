package pod

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

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
	_, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{
		Namespace: controllertest.Namespace, Name: "vm"}})
	require.NoError(t, err)
	require.Equal(t, writes, w.Writes())
}
