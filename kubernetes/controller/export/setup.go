package export

import (
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Setup adds the controller to a manager.
func Setup(mgr ctrl.Manager, o Options) error {
	r := &Reconciler{Client: mgr.GetClient(), Live: mgr.GetAPIReader(),
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager), Options: o}
	b := ctrl.NewControllerManagedBy(mgr).
		Named("export").
		For(&v1alpha1.VMIdentity{}).
		WithOptions(objects.Working(o.Concurrency))
	if !o.Off {
		// The end of a pod lets the disk be exported.
		b = b.Owns(&batchv1.Job{}).Watches(&corev1.Pod{},
			handler.EnqueueRequestsFromMapFunc(objects.Identities))
	}
	return b.Complete(objects.Reconciler(r))
}
