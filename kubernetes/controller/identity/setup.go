package identity

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Setup adds the controller to a manager.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{kit}
	// This does not wait for the cache, which is not started yet.
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &v1alpha1.VMIdentity{},
		source.Index, source.By); err != nil {
		return err
	}
	return r.For(mgr, "identity", &v1alpha1.VMIdentity{}).
		// By the label: a claim whose identity has gone may have lost its owner, too.
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		// The end of a pod lets an identity be deleted.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(objects.Identities),
			builder.WithPredicates(ended())).
		// A class that a claim needs may have come or gone.
		Watches(&storagev1.StorageClass{}, handler.EnqueueRequestsFromMapFunc(r.unbound)).
		// A new driver may be able to clone the source of a disk.
		Watches(&storagev1.CSIDriver{}, handler.EnqueueRequestsFromMapFunc(r.unbound)).
		// The source of a disk may be ready now, or allow the clone.
		Watches(&v1alpha1.VMIdentity{}, handler.EnqueueRequestsFromMapFunc(
			source.Clones(r.Client))).
		Watches(&v1alpha1.VMIdentitySnapshot{}, handler.EnqueueRequestsFromMapFunc(
			source.Clones(r.Client))).
		Complete(objects.Reconciler(r))
}

// unbound requests every identity whose claim has no volume.
func (r *Reconciler) unbound(ctx context.Context, _ client.Object) (all []reconcile.Request) {
	var ids v1alpha1.VMIdentityList
	_ = r.List(ctx, &ids, client.UnsafeDisableDeepCopy) // a started cache does not fail
	for i := range ids.Items {
		if !meta.IsStatusConditionTrue(ids.Items[i].Status.Conditions, v1alpha1.ConditionBound) {
			all = append(all, reconcile.Request{
				NamespacedName: client.ObjectKeyFromObject(&ids.Items[i])})
		}
	}
	return all
}

// ended passes only the end of a pod, whether its object stays or not.
func ended() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, ok := e.ObjectOld.(*corev1.Pod)
			after, too := e.ObjectNew.(*corev1.Pod)
			return ok && too && !objects.Finished(before) && objects.Finished(after)
		},
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}
