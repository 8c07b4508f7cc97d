package snapshot

import (
	"context"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Setup adds the controllers of this package to a manager, and returns the Populator of claims. It
// is nil if the cluster has no VolumeSnapshots, or they are turned off; after they are installed,
// the controller must be restarted.
func Setup(mgr ctrl.Manager, o Options) (*Populator, error) {
	_, err := mgr.GetRESTMapper().RESTMapping(snapshotKind.GroupKind(), snapshotKind.Version)
	none := o.Off || apimeta.IsNoMatchError(err)
	if err != nil && !none {
		return nil, err
	}
	if err := setupDisks(mgr, o, none); err != nil || none {
		return nil, err
	}
	r := &Reconciler{Client: mgr.GetClient(), Cache: mgr.GetCache(), Live: mgr.GetAPIReader(),
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager), Options: o}
	err = ctrl.NewControllerManagedBy(mgr).
		Named("snapshot").
		For(&v1alpha1.VMIdentity{}).
		Watches(&batchv1.Job{}, handler.EnqueueRequestsFromMapFunc(r.users)).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(r.users)).
		Watches(anyVolumeSnapshot(), handler.EnqueueRequestsFromMapFunc(r.users)).
		WithOptions(objects.Working(o.Concurrency)).
		Complete(objects.Reconciler(r))
	return &Populator{Cache: mgr.GetCache()}, err
}

func anyVolumeSnapshot() *unstructured.Unstructured {
	s := &unstructured.Unstructured{}
	s.SetGroupVersionKind(snapshotKind)
	return s
}

// setupDisks adds the controller of VMIdentitySnapshots. Without VolumeSnapshots it says so.
func setupDisks(mgr ctrl.Manager, o Options, none bool) error {
	r := &Disks{Client: mgr.GetClient(), Live: mgr.GetAPIReader(),
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager), Class: o.SnapshotClass}
	b := ctrl.NewControllerManagedBy(mgr).
		Named("identity-snapshot").
		For(&v1alpha1.VMIdentitySnapshot{}).
		WithOptions(objects.Working(o.Concurrency))
	if !none {
		r.Cache = mgr.GetCache()
		b = b.Owns(anyVolumeSnapshot())
	}
	return b.Complete(objects.Reconciler(r))
}

// users returns the identities that wait for a golden object.
func (r *Reconciler) users(ctx context.Context, o client.Object) (all []reconcile.Request) {
	name := o.GetLabels()[labelGolden]
	if name == "" {
		return nil
	}
	var identities v1alpha1.VMIdentityList
	if err := r.Client.List(ctx, &identities, client.InNamespace(o.GetNamespace())); err != nil {
		return nil // the cache does not fail
	}
	for i := range identities.Items {
		id := &identities.Items[i]
		if !fromImage(id) || done(id) {
			continue
		}
		if class, ok := r.Options.class(id); ok && Name(id.Spec.Image, class) == name {
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(id)})
		}
	}
	return all
}
