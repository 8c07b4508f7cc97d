package local_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/local"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// TestCacheIsLate: a claim that was just made stays while the cache does not have the status that
// says so. The newer version comes as an event, and the move goes on.
func TestCacheIsLate(t *testing.T) {
	w := newWorld(t, &controllertest.Calls{})
	former := w.claim().Spec.VolumeName
	w.remove(&corev1.Pod{}, "vm")
	w.annotate("node-2")
	id := w.identity()
	id.Status.UsedBy = nil
	require.NoError(t, w.Status().Update(t.Context(), id))

	var late *v1alpha1.VMIdentity // what the cache has; nil: the newest
	cache := interceptor.NewClient(w.WithWatch, interceptor.Funcs{Get: func(ctx context.Context,
		c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		if id, ok := o.(*v1alpha1.VMIdentity); ok && late != nil {
			late.DeepCopyInto(id)
			return nil
		}
		return c.Get(ctx, key, o, opts...)
	}})
	r := &local.Reconciler{Kit: objects.Kit{Client: cache, Live: w,
		Events: &events.FakeRecorder{Events: w.events}}}
	reconcile := func() {
		t.Helper()
		_, err := objects.Reconciler(r).Reconcile(t.Context(), ctrl.Request{
			NamespacedName: types.NamespacedName{Namespace: namespace, Name: "vm"}})
		require.NoError(t, err)
	}
	made := &corev1.PersistentVolumeClaim{}
	for range 10 {
		before := w.identity()
		if reconcile(); w.get("vmmove-vm", made) {
			late = before
			break
		}
	}
	require.NotEmpty(t, made.UID)
	reconcile()
	has := &corev1.PersistentVolumeClaim{}
	require.True(t, w.get("vmmove-vm", has), "it was just made")
	require.Equal(t, made.UID, has.UID)
	require.Nil(t, has.DeletionTimestamp)
	w.converge()
	w.moved(former)
}
