package set

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

func size(text string) *resource.Quantity {
	q := resource.MustParse(text)
	return &q
}

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
		return []controllertest.Reconciler{&Reconciler{Client: w.Client, Events: w,
			Options: Options{UsageTypes: usageTypes}}}
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
	for n := 0; ; n++ {
		set := &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"},
			Spec: v1alpha1.DiskSpec{Size: size("20Gi")}}
		w := newWorld(t, set, newIdentity("a", "set", size("10Gi"), true),
			newIdentity("b", "set", size("30Gi"), false), newIdentity("c", "set", nil, true),
			newIdentity("d", "other", size("1Gi"), true))
		w.FailAt = n
		settle(t, w, nil)
		require.EqualValues(t, 3, status(t, w).Identities)
		require.EqualValues(t, 2, status(t, w).ReadyIdentities)
		require.True(t, meta.IsStatusConditionTrue(status(t, w).Conditions, "Ready"))
		for name, want := range map[string]string{
			"a": "20Gi", "b": "30Gi", "c": "20Gi", "d": "1Gi"} {
			id := &v1alpha1.VMIdentity{}
			require.NoError(t, w.Base.Get(t.Context(),
				client.ObjectKey{Namespace: "test", Name: name}, id))
			require.Equal(t, want, id.Spec.Size.String(), name)
		}
		require.Equal(t, 3, w.Writes())
		if w.Requests() < n {
			return
		}
	}
}

func TestUsageTypeUnknown(t *testing.T) {
	w := newWorld(t, &v1alpha1.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"},
		Spec: v1alpha1.DiskSpec{UsageType: "fast"}})
	settle(t, w, nil)
	c := meta.FindStatusCondition(status(t, w).Conditions, "Ready")
	require.Equal(t, v1alpha1.ReasonInvalid, c.Reason)
	require.Contains(t, c.Message, "--usage-type has none")
	require.Equal(t, []string{"Warning Invalid"}, w.Events())
	settle(t, w, map[string]string{"fast": "nvme"})
	require.True(t, meta.IsStatusConditionTrue(status(t, w).Conditions, "Ready"))
}
