package hydration

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Options are the settings of the controller.
type Options struct {
	// Concurrency is how many pods are asked at once. 0: one.
	Concurrency int
}

// Setup adds the controller to a manager, whose cache has objects.IndexIdentity of pods.
func Setup(mgr ctrl.Manager, o Options) error {
	r := &Reconciler{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Ask: ask,
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager)}
	return ctrl.NewControllerManagedBy(mgr).
		Named("hydration").
		For(&v1alpha1.VMIdentity{}).
		WatchesRawSource(r.aside.Source()).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		// A claim may be another one now.
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		WithOptions(objects.Working(o.Concurrency)).
		Complete(objects.Reconciler(r))
}

// server is the pod that serves the disk of an identity and has an address, or nil.
func (r *Reconciler) server(ctx context.Context, id *v1alpha1.VMIdentity) (*corev1.Pod, error) {
	var pods corev1.PodList
	if err := r.List(ctx, &pods, client.InNamespace(id.Namespace),
		client.MatchingFields{objects.IndexIdentity: id.Name}); err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if !objects.Finished(p) && p.Status.PodIP != "" && objects.DiskContainer(&p.Spec) != nil {
			return p, nil
		}
	}
	return nil, nil
}
