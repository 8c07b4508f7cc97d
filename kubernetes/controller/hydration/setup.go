package hydration

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

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
	r := &Reconciler{Client: mgr.GetClient(), Ask: ask,
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager)}
	answered := make(chan event.GenericEvent, 1)
	r.Answered = func(id types.NamespacedName) {
		answered <- event.GenericEvent{Object: &v1alpha1.VMIdentity{
			ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: id.Name}}}
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("hydration").
		For(&v1alpha1.VMIdentity{}).
		WatchesRawSource(source.Channel(answered, &handler.EnqueueRequestForObject{})).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: o.Concurrency,
			RateLimiter:             objects.Backoff[reconcile.Request](),
		}).
		Complete(r)
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
