package set

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

var size = controllertest.Quantity

func newIdentity(name, set string, size *resource.Quantity, ready bool) *v1alpha1.VMIdentity {
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: name}}
	id.Spec.SetName, id.Spec.Size, id.Status.Ready = set, size, ready
	return id
}

func newWorld(t *testing.T, objects ...client.Object) *controllertest.World {
	return controllertest.New(t, []controllertest.Index{
		{Object: &v1alpha1.VMIdentity{}, Field: indexSet, Of: bySet}}, objects...)
}

func settle(t *testing.T, w *controllertest.World, usageTypes map[string]string) {
	t.Helper()
	w.Settle(t, func() []controllertest.Reconciler {
		return []controllertest.Reconciler{&Reconciler{objects.Kit{Client: w.Client, Events: w,
			Options: objects.Options{UsageTypes: usageTypes}}}}
	}, "set")
}

func status(t *testing.T, w *controllertest.World) v1alpha1.VMIdentitySetStatus {
	t.Helper()
	set := &v1alpha1.VMIdentitySet{}
	key := client.ObjectKey{Namespace: "test", Name: "set"}
	require.NoError(t, w.Base.Get(t.Context(), key, set))
	return set.Status
}

func TestCountsAndGrows(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		set := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"},
			Spec: v1alpha1.DiskSpec{Size: size("20Gi")}}
		w := newWorld(t, set, newIdentity("a", "set", size("10Gi"), true),
			newIdentity("b", "set", size("30Gi"), false), newIdentity("c", "set", nil, true),
			newIdentity("d", "other", size("1Gi"), true), controllertest.DefaultClass())
		w.Calls = calls
		settle(t, w, nil)
		require.EqualValues(t, 3, status(t, w).Identities)
		require.EqualValues(t, 2, status(t, w).ReadyIdentities)
		require.True(t, meta.IsStatusConditionTrue(status(t, w).Conditions, "Ready"))
		for name, want := range map[string]string{
			"a": "20Gi", "b": "30Gi", "c": "20Gi", "d": "1Gi"} {
			id := controllertest.Get(t, w.Base, "test", name, &v1alpha1.VMIdentity{})
			require.Equal(t, want, id.Spec.Size.String(), name)
		}
		require.Equal(t, 3, w.Writes())
	})
}

func TestUsageTypeUnknown(t *testing.T) {
	w := newWorld(t, &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"},
		Spec: v1alpha1.DiskSpec{UsageType: "fast"}}, controllertest.Class("nvme"))
	settle(t, w, nil)
	c := meta.FindStatusCondition(status(t, w).Conditions, "Ready")
	require.Equal(t, v1alpha1.ReasonInvalid, c.Reason)
	require.Contains(t, c.Message, "--usage-type has none")
	require.Equal(t, []string{"Warning Invalid"}, w.Events())
	settle(t, w, map[string]string{"fast": "nvme"})
	require.True(t, meta.IsStatusConditionTrue(status(t, w).Conditions, "Ready"))
}

// TestNotReady: a set whose pods would wait for ever says so, until that is mended.
func TestNotReady(t *testing.T) {
	bound := newIdentity("a", "set", nil, true)
	bound.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionBound,
		Status: metav1.ConditionTrue}}
	name, empty := "fast", ""
	for what, c := range map[string]struct {
		spec    v1alpha1.DiskSpec
		objects []client.Object
		says    string
	}{
		"a class that does not exist": {v1alpha1.DiskSpec{StorageClassName: &name},
			[]client.Object{controllertest.DefaultClass()}, "there is no StorageClass fast"},
		"no class": {v1alpha1.DiskSpec{StorageClassName: &empty}, nil, ""},
		"a class": {v1alpha1.DiskSpec{StorageClassName: &name},
			[]client.Object{controllertest.Class(name)}, ""},
		"no default": {v1alpha1.DiskSpec{}, []client.Object{controllertest.Class(name)},
			"no default"},
		"volumes by hand": {v1alpha1.DiskSpec{StorageClassName: &name}, []client.Object{bound}, ""},
		"no snapshots": {v1alpha1.DiskSpec{Population: v1alpha1.Snapshot},
			[]client.Object{controllertest.DefaultClass()}, "the controller has no snapshots"},
	} {
		w := newWorld(t, append(c.objects, &v1alpha1.VMIdentitySet{
			ObjectMeta: metav1.ObjectMeta{Name: "set"}, Spec: c.spec})...)
		settle(t, w, nil)
		ready := meta.FindStatusCondition(status(t, w).Conditions, "Ready")
		require.Equal(t, c.says == "", ready.Status == metav1.ConditionTrue, what)
		require.Equal(t, c.says == "", status(t, w).Ready, what)
		require.Contains(t, ready.Message, c.says, what)
	}
}

// queue records the requests.
type queue struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	asked []string
}

func (q *queue) AddAfter(r reconcile.Request, _ time.Duration) {
	q.asked = append(q.asked, r.String())
}

// TestEvents checks which events count a set, and which of them at once.
func TestEvents(t *testing.T) {
	old := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: "set",
		UID: "1", Generation: 1}}
	grown, again, counted := old.DeepCopy(), old.DeepCopy(), old.DeepCopy()
	grown.Generation, again.UID, counted.Status.Identities = 2, "2", 1
	now := objects.NewSpec()
	require.True(t, now.Create(event.CreateEvent{Object: old}))
	require.True(t, now.Update(event.UpdateEvent{ObjectOld: old, ObjectNew: grown}))
	require.True(t, now.Update(event.UpdateEvent{ObjectOld: old, ObjectNew: again}),
		"it was deleted and made again while the watch was lost")
	require.False(t, now.Update(event.UpdateEvent{ObjectOld: old, ObjectNew: counted}))

	q := &queue{}
	set, ids := later(itself), later(bySet)
	set.Update(t.Context(), event.UpdateEvent{ObjectOld: old, ObjectNew: counted}, q)
	require.Contains(t, q.asked, "test/set")
	for what, happens := range map[string]func(){
		"made": func() {
			ids.Create(t.Context(), event.CreateEvent{Object: inTest("a", "new")}, q)
		},
		"changed": func() {
			ids.Update(t.Context(), event.UpdateEvent{ObjectOld: inTest("a", "new"),
				ObjectNew: inTest("a", "new")}, q)
		},
		"made again for another set": func() {
			ids.Update(t.Context(), event.UpdateEvent{ObjectOld: inTest("a", "former"),
				ObjectNew: inTest("a", "new")}, q)
			require.Contains(t, q.asked, "test/former")
		},
		"deleted": func() {
			ids.Delete(t.Context(), event.DeleteEvent{Object: inTest("a", "new")}, q)
		},
	} {
		q.asked = nil
		happens()
		require.Contains(t, q.asked, "test/new", what)
	}
	q.asked = nil
	ids.Create(t.Context(), event.CreateEvent{Object: inTest("a", "")}, q)
	require.Empty(t, q.asked, "it has no set")
}

func inTest(name, set string) *v1alpha1.VMIdentity {
	id := newIdentity(name, set, nil, false)
	id.Namespace = "test"
	return id
}
