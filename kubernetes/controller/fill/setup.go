package fill

import (
	"context"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// indexImage is the index of claims by the VMImage that is their source.
const indexImage = v1alpha1.Group + "/claim-image"

// byImage returns the keys of a claim in indexImage.
func byImage(o client.Object) []string {
	if name := imageOf(o.(*corev1.PersistentVolumeClaim)); name != "" {
		return []string{name}
	}
	return nil
}

// Setup adds the controller to a manager. It has its own cache, because that of the manager has
// only the claims of identities.
func Setup(mgr ctrl.Manager, kit objects.Kit, keys Keys) error {
	all := cache.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		HTTPClient: mgr.GetHTTPClient(), ByObject: map[client.Object]cache.ByObject{
			&corev1.PersistentVolumeClaim{}: {Transform: strip}}}
	if len(kit.Options.Namespaces) > 0 {
		all.DefaultNamespaces = map[string]cache.Config{}
		for _, n := range kit.Options.Namespaces {
			all.DefaultNamespaces[n] = cache.Config{}
		}
	}
	claims, err := cache.New(mgr.GetConfig(), all)
	if err != nil {
		return err
	}
	if err := claims.IndexField(context.Background(), &corev1.PersistentVolumeClaim{}, indexImage,
		byImage); err != nil {
		return err
	}
	if err := mgr.Add(claims); err != nil {
		return err
	}
	r := &Reconciler{Kit: kit, Claims: claims, Ask: objects.ReadProgress, Keys: keys}
	return r.ForAsking(mgr, "fill", &v1alpha1.VMImage{}).
		WatchesRawSource(source.Kind(claims, client.Object(&corev1.PersistentVolumeClaim{}),
			handler.EnqueueRequestsFromMapFunc(ofImage))).
		Watches(&batchv1.Job{}, handler.EnqueueRequestsFromMapFunc(ofImage)).
		Complete(objects.Reconciler(r))
}

// ofImage requests the VMImage of a claim, or of a Job or claim that fills one.
func ofImage(_ context.Context, o client.Object) []reconcile.Request {
	name := o.GetAnnotations()[annotationImage]
	if claim, ok := o.(*corev1.PersistentVolumeClaim); ok && imageOf(claim) != "" {
		name = imageOf(claim)
	}
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{
		Namespace: o.GetNamespace(), Name: name}}}
}
