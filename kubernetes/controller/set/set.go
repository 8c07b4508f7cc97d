// Package set counts the identities of a VMIdentitySet, reports whether the set can be used, and
// enlarges its identities when the set's size grows. It deletes nothing: identities outlive their
// set.
package set

import (
	"context"
	"fmt"
	"slices"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Reconciler writes the status of sets.
type Reconciler struct{ objects.Kit }

// indexSet finds the identities of a set.
const indexSet = "spec.setName"

// calm is how long changes of a set's identities are gathered before they are counted, so that a
// thousand pods that start at once cause only a few writes.
const calm = 500 * time.Millisecond

// Setup adds the controller to a manager.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	// This does not wait for the cache, which is not started yet.
	err := mgr.GetFieldIndexer().IndexField(context.Background(), &v1alpha1.VMIdentity{}, indexSet,
		bySet)
	if err != nil {
		return err
	}
	r := &Reconciler{kit}
	return r.For(mgr, "set", &v1alpha1.VMIdentitySet{}, builder.WithPredicates(objects.NewSpec())).
		// A new set or a new spec is handled at once. A change of the status is handled later: the
		// controller writes the status itself, and would count again after each write, as fast as
		// it can write.
		Watches(&v1alpha1.VMIdentitySet{}, later(itself)).
		Watches(&v1alpha1.VMIdentity{}, later(bySet)).
		// A class that a set needs may have come or gone.
		Watches(&storagev1.StorageClass{}, handler.EnqueueRequestsFromMapFunc(r.all)).
		Complete(objects.Reconciler(r))
}

func bySet(o client.Object) []string {
	if id, ok := o.(*v1alpha1.VMIdentity); ok && id.Spec.SetName != "" {
		return []string{id.Spec.SetName}
	}
	return nil
}

// all requests every set.
func (r *Reconciler) all(ctx context.Context, _ client.Object) (all []reconcile.Request) {
	var sets v1alpha1.VMIdentitySetList
	_ = r.List(ctx, &sets) // a started cache does not fail
	for i := range sets.Items {
		all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(
			&sets.Items[i])})
	}
	return all
}

func itself(set client.Object) []string { return []string{set.GetName()} }

// later queues the sets of an object a moment after the object has changed. names returns the names
// of these sets.
func later(names func(client.Object) []string) handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	add := func(o client.Object, q queue) {
		for _, name := range names(o) {
			q.AddAfter(reconcile.Request{NamespacedName: types.NamespacedName{
				Namespace: o.GetNamespace(), Name: name}}, calm)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { add(e.Object, q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			// An identity that was made again while the watch was lost may belong to another set.
			add(e.ObjectOld, q)
			add(e.ObjectNew, q)
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { add(e.Object, q) },
	}
}

// Reconcile counts the identities of one set and lets them grow.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before := &v1alpha1.VMIdentitySet{}
	if err := r.Get(ctx, req.NamespacedName, before); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	var ids v1alpha1.VMIdentityList
	if err := r.List(ctx, &ids, client.InNamespace(req.Namespace),
		client.MatchingFields{indexSet: req.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, fmt.Errorf("VMIdentities: %w", err)
	}
	set := before.DeepCopy()
	set.Status.ObservedGeneration = set.Generation
	set.Status.Identities, set.Status.ReadyIdentities = int32(len(ids.Items)), 0
	for i := range ids.Items {
		if ids.Items[i].Status.Ready {
			set.Status.ReadyIdentities++
		}
	}
	ready, err := r.ready(ctx, set, ids.Items)
	if err != nil {
		return ctrl.Result{}, err
	}
	set.Status.Ready = ready.Status == metav1.ConditionTrue
	objects.SetCondition(&set.Status.Conditions, set.Generation, ready)
	if err := r.Report(ctx, before, set); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, r.grow(ctx, set, ids.Items)
}

// ready reports whether pods can use a set.
func (r *Reconciler) ready(ctx context.Context, set *v1alpha1.VMIdentitySet,
	ids []v1alpha1.VMIdentity) (metav1.Condition, error) {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	class, wrong, err := r.ClassOf(ctx, &set.Spec)
	if err != nil {
		return c, err
	}
	if wrong == "" && source.OfImage(&set.Spec) && r.Snapshots == nil {
		wrong = "population is Snapshot, and the controller has no snapshots: install the CRDs " +
			"of VolumeSnapshots and restart the controller, or make a set with Overlay"
	}
	if wrong != "" {
		c.Reason, c.Message = v1alpha1.ReasonInvalid, wrong
		return c, nil
	}
	missing, err := objects.MissingClass(ctx, r, class, "set")
	if err != nil {
		return c, err
	}
	// Volumes made by hand may have the name of a class that does not exist.
	if missing != "" && !slices.ContainsFunc(ids, func(id v1alpha1.VMIdentity) bool {
		return meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionBound)
	}) {
		c.Reason, c.Message = v1alpha1.ReasonClassMissing, missing
		return c, nil
	}
	c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonReady
	c.Message = "pods can use the set"
	return c, nil
}

// grow gives the set's size to all its smaller identities. It must not change the list, which
// belongs to the cache.
func (r *Reconciler) grow(ctx context.Context, set *v1alpha1.VMIdentitySet,
	ids []v1alpha1.VMIdentity) error {
	if set.Spec.Size == nil {
		return nil
	}
	for i := range ids {
		before := &ids[i]
		if !before.DeletionTimestamp.IsZero() || !smaller(before.Spec.Size, *set.Spec.Size) {
			continue
		}
		id := before.DeepCopy()
		size := set.Spec.Size.DeepCopy()
		id.Spec.Size = &size
		err := r.Patch(ctx, id, objects.Lock(before.DeepCopy()),
			client.FieldOwner(v1alpha1.FieldManager))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("size of VMIdentity %s: %w", id.Name, err)
		}
	}
	return nil
}

// smaller reports whether a size is missing, or smaller than another one.
func smaller(size *resource.Quantity, than resource.Quantity) bool {
	return size == nil || size.Cmp(than) < 0
}
