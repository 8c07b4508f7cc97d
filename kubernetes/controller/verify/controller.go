package verify

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/registry/signature"
)

// Reconciler looks for the signatures of identities' images, and writes the result into their
// status.
type Reconciler struct {
	objects.Kit
	Verifier *Verifier
}

// Setup adds the controller to a manager, and returns the check of images for other controllers. It
// is nil if no signatures are required.
func Setup(mgr ctrl.Manager, kit objects.Kit, v *Verifier) (objects.Images, error) {
	r := &Reconciler{kit, v}
	b := r.For(mgr, "verify", &v1alpha1.VMIdentity{})
	if v.Options.Policies == "" { // earlier policies may have left conditions
		return nil, b.Complete(objects.Reconciler(r))
	}
	// Policies and labels may have changed since the last pod.
	return v, b.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(objects.Identities),
			builder.WithPredicates(predicate.Funcs{
				UpdateFunc: func(event.UpdateEvent) bool { return false },
				DeleteFunc: func(event.DeleteEvent) bool { return false }})).
		Complete(objects.Reconciler(r))
}

// The times until the next check: soon and late after a registry did not answer, later after an
// image was refused, because it may be signed, and rarely after success, because no event announces
// a change of a policy.
const (
	soon   = 5 * time.Second
	late   = time.Minute
	seldom = 10 * time.Minute
)

// Reconcile looks for the signature of the image of one identity, unless its status has a valid
// one.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Client, "VMIdentity",
		req.NamespacedName)
	if before == nil || err != nil || before.DeletionTimestamp != nil || before.Spec.Image == "" {
		return ctrl.Result{}, err
	}
	a, err := r.Verifier.ask(ctx, before)
	if err != nil {
		return ctrl.Result{}, err
	}
	id := before.DeepCopy()
	requeueAfter := r.applyVerdict(ctx, id, a)
	return ctrl.Result{RequeueAfter: requeueAfter}, r.Report(ctx, before, id)
}

// applyVerdict sets the condition and the key, and returns the time of the next check.
func (r *Reconciler) applyVerdict(ctx context.Context, id *v1alpha1.VMIdentity,
	a asked) time.Duration {
	set := func(status metav1.ConditionStatus, reason, message string) {
		objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
			Type: v1alpha1.ConditionVerified, Status: status, Reason: reason, Message: message})
	}
	switch {
	case a.reason != "":
		set(metav1.ConditionFalse, a.reason, a.message)
		return late
	case len(a.keys) == 0:
		meta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionVerified)
		return seldom
	}
	if !signed(id, a.keys) {
		key, err := r.Verifier.findSignature(ctx, a)
		switch {
		case errors.As(err, new(*signature.RefusedError)):
			set(metav1.ConditionFalse, v1alpha1.ReasonNotSigned, short(err))
			return late
		case err != nil:
			set(metav1.ConditionFalse, v1alpha1.ReasonUnverified, "its image is not used before "+
				"its signature was verified, and that is tried again: "+short(err))
			c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionVerified)
			return min(max(time.Since(c.LastTransitionTime.Time), soon), late)
		}
		id.Status.SignedBy = &v1alpha1.SignedBy{Image: id.Spec.Image, Key: key}
	}
	set(metav1.ConditionTrue, v1alpha1.ReasonSigned, "the key "+id.Status.SignedBy.Key+
		" has signed the image")
	return seldom
}
