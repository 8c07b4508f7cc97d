package identity

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Reconciler makes claims and secrets.
type Reconciler struct{ objects.Kit }

// verdict is the content of condition Ready. poll: no event announces a change.
type verdict struct {
	ready           bool
	reason, message string
	poll            bool
}

// The shortest and longest wait for a change without an event.
const (
	minPoll = 2 * time.Second
	maxPoll = time.Minute
)

// Reconcile brings the claim, the secret and the status of one identity up to date.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Client, "VMIdentity",
		req.NamespacedName)
	if err != nil {
		return ctrl.Result{}, err
	}
	if before == nil {
		return ctrl.Result{}, r.forsaken(ctx, req.NamespacedName)
	}
	if !before.DeletionTimestamp.IsZero() {
		return r.remove(ctx, before)
	}
	return r.keep(ctx, before)
}

// keep makes the objects of an identity, and writes its status.
func (r *Reconciler) keep(ctx context.Context, before *v1alpha1.VMIdentity) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(before, v1alpha1.Finalizer) {
		return ctrl.Result{}, r.SetFinalizer(ctx, before, v1alpha1.Finalizer, true)
	}
	if before.Status.Move != nil {
		return ctrl.Result{}, nil // package local has the claim, and reports the progress
	}
	id := before.DeepCopy()
	v, err := r.provide(ctx, id)
	if err != nil {
		return ctrl.Result{}, err
	}
	conclude(id, v)
	if err := r.Report(ctx, before, id); err != nil {
		return ctrl.Result{}, err
	}
	return requeueAfter(id, v), nil
}

// provide makes missing objects, records the objects in the status, and returns whether the
// identity is ready.
func (r *Reconciler) provide(ctx context.Context, id *v1alpha1.VMIdentity) (*verdict, error) {
	reason, message, err := r.ImageRefused(ctx, id)
	if err != nil {
		return nil, err
	}
	var refusedImage *verdict
	if reason != "" {
		refusedImage = &verdict{reason: reason, message: message, poll: true}
	}
	if refusedImage != nil && id.Status.ClaimName == "" {
		return refusedImage, nil // no object is made for it
	}
	claim, why, err := r.claim(ctx, id)
	if why == nil && err == nil {
		claim, err = r.adopt(ctx, id, claim)
	}
	if why == nil && err == nil {
		why = r.inspect(id, claim)
	}
	if why == nil && err == nil && id.Status.SecretName == "" {
		err = r.Create(ctx, secret(id), client.FieldOwner(v1alpha1.FieldManager))
		why, err = refused(client.IgnoreAlreadyExists(err), "the secret")
		if why == nil && err == nil {
			id.Status.SecretName = v1alpha1.SecretName(id.Name)
		}
	}
	if why == nil && err == nil {
		why, err = r.classless(ctx, claim)
	}
	if why == nil && err == nil {
		why, err = noSource(source.Finder{Kit: r.Kit}.Gone(ctx, id, claim))
	}
	if why == nil && err == nil {
		why = refusedImage
	}
	if why == nil && err == nil {
		why = unserved(id)
	}
	if why != nil || err != nil {
		return why, err
	}
	return r.grow(ctx, id, claim)
}

// conclude sets condition Ready and the fields that depend on it.
func conclude(id *v1alpha1.VMIdentity, v *verdict) {
	ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v.reason, Message: v.message}
	if v.ready {
		ready.Status = metav1.ConditionTrue
	}
	if v.ready && id.Status.CreationTime == nil {
		now := metav1.Now()
		id.Status.CreationTime = &now
	}
	id.Status.Ready = v.ready
	id.Status.ObservedGeneration = id.Generation
	objects.SetCondition(&id.Status.Conditions, id.Generation, ready)
}

// unserved returns why a disk with a server pod cannot be used: it does not accept logins yet.
func unserved(id *v1alpha1.VMIdentity) *verdict {
	if id.Spec.Attachment != v1alpha1.Service {
		return nil
	}
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionServed)
	switch {
	case c == nil:
		return &verdict{reason: v1alpha1.ReasonStarting, message: "the server has no pod yet"}
	case c.Status != metav1.ConditionTrue:
		return &verdict{reason: c.Reason, message: c.Message}
	}
	return nil
}

// requeueAfter is when to reconcile an identity again. The wait is as long as the identity has been
// in its present state, between minPoll and maxPoll.
func requeueAfter(id *v1alpha1.VMIdentity, v *verdict) ctrl.Result {
	if !v.poll {
		return ctrl.Result{}
	}
	after := minPoll
	if c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionReady); c != nil {
		after = min(max(time.Since(c.LastTransitionTime.Time), minPoll), maxPoll)
	}
	return ctrl.Result{RequeueAfter: after}
}
