package service

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Setup adds the controller to a manager, whose cache has the Deployments and Services with
// v1alpha1.LabelIdentity.
func Setup(mgr ctrl.Manager, o Options) error {
	r := &Reconciler{Client: mgr.GetClient(), Events: mgr.GetEventRecorder(v1alpha1.FieldManager),
		Options: o}
	if o.Off {
		return ctrl.NewControllerManagedBy(mgr).Named("service").For(&v1alpha1.VMIdentity{}).
			WithOptions(objects.Working(0)).
			Complete(objects.Reconciler(r))
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("service").
		For(&v1alpha1.VMIdentity{}).
		Watches(&appsv1.Deployment{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Watches(&corev1.Service{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelServer))).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(labelVolume))).
		WatchesRawSource(r.aside.Source()).
		WithOptions(objects.Working(o.Concurrency)).
		Complete(objects.Reconciler(r))
}
