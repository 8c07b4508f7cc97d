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
// VolumeSnapshots for a source.Finder. It is nil if the cluster has no VolumeSnapshots, or they are
// turned off. After they are installed, the controller must be restarted.
func Setup(mgr ctrl.Manager, kit objects.Kit) (client.Reader, error) {
	kind := source.SnapshotKind
	_, err := mgr.GetRESTMapper().RESTMapping(kind.GroupKind(), kind.Version)
	none := kit.Options.Off(objects.Snapshots) || apimeta.IsNoMatchError(err)
	if err != nil && !none {
		return nil, err
	}
	disks := kit.For(mgr, "identity-snapshot", &v1alpha1.VMIdentitySnapshot{})
	if none {
		return nil, disks.Complete(objects.Reconciler(&Disks{kit}))
	}
	kit.Snapshots = mgr.GetCache()
	if err := disks.Owns(source.NewSnapshot()).Complete(
		objects.Reconciler(&Disks{kit})); err != nil {
		return nil, err
	}
	r := &Reconciler{kit}
	return r.Snapshots, r.For(mgr, "snapshot", &v1alpha1.VMIdentity{}).
		Watches(&batchv1.Job{}, handler.EnqueueRequestsFromMapFunc(r.users)).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(r.users)).
		Watches(source.NewSnapshot(), handler.EnqueueRequestsFromMapFunc(r.users)).
		Complete(objects.Reconciler(r))
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
		if _, its, _ := r.golden(ctx, id); its == name { // the cache does not fail
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(id)})
		}
	}
	return all
}
