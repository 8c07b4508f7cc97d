package pod

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// indexWaiting finds the pods that wait for a set.
const indexWaiting = v1alpha1.Group + "/pod-waits-for-set"

// Setup adds the controller to a manager, whose cache has objects.IndexIdentity of pods.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	// This does not wait for the cache, which is not started yet.
	err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{}, indexWaiting,
		byWaiting)
	if err != nil {
		return err
	}
	r := &Reconciler{Kit: kit}
	return r.For(mgr, "pod", &v1alpha1.VMIdentity{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(objects.Identities)).
		// A set may have appeared, or its firmwareUUID may be free now.
		Watches(&v1alpha1.VMIdentitySet{}, handler.EnqueueRequestsFromMapFunc(r.waitingFor),
			builder.WithPredicates(setMatters())).
		Complete(objects.Reconciler(r))
}

// setMatters ignores changes of the counts in a set's status. They change when an identity becomes
// ready, and would wake all pods that wait for the set.
func setMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok := e.ObjectOld.(*v1alpha1.VMIdentitySet)
		after, too := e.ObjectNew.(*v1alpha1.VMIdentitySet)
		return !ok || !too || objects.Anew(before, after) ||
			!equality.Semantic.DeepEqual(before.Status.UsedBy, after.Status.UsedBy)
	}}
}

func byWaiting(o client.Object) []string {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return nil
	}
	var sets []string
	for _, identity := range objects.ByIdentity(p) {
		if a := objects.Asks(p, identity); a.Gate >= 0 {
			sets = append(sets, a.SetName)
		}
	}
	return sets
}

// waitingFor returns the identities whose pods wait for a set.
func (r *Reconciler) waitingFor(ctx context.Context, set client.Object) (all []reconcile.Request) {
	var pods corev1.PodList
	// The cache does not fail once it has started.
	_ = r.List(ctx, &pods, client.InNamespace(set.GetNamespace()),
		client.MatchingFields{indexWaiting: set.GetName()})
	for i := range pods.Items {
		all = append(all, objects.Identities(ctx, &pods.Items[i])...)
	}
	return all
}
