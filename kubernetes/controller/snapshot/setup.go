package snapshot

import (
	"context"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Setup adds the controllers of this package to a manager, and returns the reader of
// VolumeSnapshots for a source.Finder. It is nil if the cluster has none, or they are turned off;
// after they are installed, the controller must be restarted.
func Setup(mgr ctrl.Manager, o Options) (client.Reader, error) {
	kind := source.SnapshotKind
	_, err := mgr.GetRESTMapper().RESTMapping(kind.GroupKind(), kind.Version)
	none := o.Off || apimeta.IsNoMatchError(err)
	if err != nil && !none {
		return nil, err
	}
	if err := setupDisks(mgr, o, none); err != nil || none {
		return nil, err
	}
	r := &Reconciler{Client: mgr.GetClient(), Cache: mgr.GetCache(), Live: mgr.GetAPIReader(),
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager), Options: o}
	return r.Cache, ctrl.NewControllerManagedBy(mgr).
		Named("snapshot").
		For(&v1alpha1.VMIdentity{}).
		Watches(&batchv1.Job{}, handler.EnqueueRequestsFromMapFunc(r.users)).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(r.users)).
		Watches(source.NewSnapshot(), handler.EnqueueRequestsFromMapFunc(r.users)).
		WithOptions(objects.Working(o.Concurrency)).
		Complete(objects.Reconciler(r))
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
		b = b.Owns(source.NewSnapshot())
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
		if !source.OfImage(&id.Spec.DiskSpec) || done(id) {
			continue
		}
		class, wrong := objects.ClassOf(&id.Spec.DiskSpec, r.Options.UsageTypes)
		if wrong == "" && source.Golden(id.Spec.Image, class) == name {
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(id)})
		}
	}
	return all
}
