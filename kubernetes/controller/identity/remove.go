package identity

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// remove deletes the objects of an identity that is being deleted, and then its finalizer. While a
// pod uses the claim, it deletes nothing: Kubernetes would keep the claim, too, but its deletion
// could not be undone.
func (r *Reconciler) remove(ctx context.Context, before *v1alpha1.VMIdentity) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(before, v1alpha1.Finalizer) {
		return ctrl.Result{}, nil
	}
	if slices.Contains(before.Finalizers, metav1.FinalizerOrphanDependents) {
		// `kubectl delete --cascade=orphan` keeps the claim: the garbage collector removes our
		// ownership from it, and then this finalizer from the identity.
		return ctrl.Result{}, nil
	}
	// The cache may be late, and does not change any more after the right to read pods has gone.
	pods, err := objects.PodsOf(ctx, r.Live, before)
	if apierrors.IsForbidden(err) {
		return ctrl.Result{}, r.letGo(ctx, before, err)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if pod := objects.User(pods, before); pod != "" {
		return ctrl.Result{RequeueAfter: maxPoll}, r.deleting(ctx, before, fmt.Sprintf(
			"pod %s uses the disk: the disk is deleted when the pod has ended", pod))
	}
	claim, err := objects.Claim(ctx, r.Live, before)
	if err != nil {
		return ctrl.Result{}, err
	}
	clone, err := source.Finder{Kit: r.Kit}.Waiting(ctx, before.Namespace,
		v1alpha1.DiskSource{Identity: v1alpha1.SourceName(before.Name)})
	if err != nil {
		return ctrl.Result{}, err
	}
	if clone != "" && claim != nil { // it gets nothing from a disk without a claim
		return ctrl.Result{RequeueAfter: maxPoll}, r.deleting(ctx, before, fmt.Sprintf(
			"VMIdentity %s begins from this disk and has no volume yet: it gets one when a pod "+
				"starts with it, or delete it, too", clone))
	}
	ours := claim != nil && metav1.IsControlledBy(claim, before)
	if before.Status.SecretName != "" || ours {
		err := deleteSecret(ctx, r.Client, before, v1alpha1.SecretName(before.Name))
		if err != nil {
			return ctrl.Result{}, err
		}
	}
	if ours {
		err := objects.DeleteClaim(ctx, r.Client, claim)
		// A policy of the cluster may keep claims. The log alone would say why nothing happens.
		_, message := objects.Refused(err, "that the claim "+claim.Name+" is deleted")
		switch {
		case message != "":
		case err != nil:
			return ctrl.Result{}, err
		default:
			message = fmt.Sprintf("the claim %s is being deleted: `kubectl describe pvc %s` says "+
				"which pod still has it", claim.Name, claim.Name)
		}
		// The end of the claim triggers another reconcile.
		return ctrl.Result{RequeueAfter: maxPoll}, r.deleting(ctx, before, message)
	}
	// --cascade=orphan has removed the owner. The claim stays, and any other object may take it.
	if claim != nil && claim.Labels[v1alpha1.LabelIdentity] == before.Name &&
		!ownedByAnother(claim, before) {
		if err := objects.ReleaseClaim(ctx, r.Client, claim); err != nil {
			return ctrl.Result{}, err
		}
	}
	return ctrl.Result{}, r.SetFinalizer(ctx, before, v1alpha1.Finalizer, false)
}

// letGo removes all our finalizers from an identity in a namespace that is being deleted, if the
// controller has lost its rights there. Kubernetes deletes the claim, the secret and all their
// users, and keeps the claim while a pod has it. why is the refusal of the API server.
func (r *Reconciler) letGo(ctx context.Context, before *v1alpha1.VMIdentity, why error) error {
	namespace := &corev1.Namespace{}
	if err := r.Live.Get(ctx, client.ObjectKey{Name: before.Namespace}, namespace); err != nil {
		return errors.Join(why, err)
	}
	if namespace.DeletionTimestamp == nil {
		return why
	}
	// Without the right to read the claim, this removes only our finalizer from it.
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: before.Namespace, Name: v1alpha1.ClaimName(before.Name)}}
	if err := r.Patch(ctx, claim, client.RawPatch(types.StrategicMergePatchType, fmt.Appendf(nil,
		`{"metadata":{"$deleteFromPrimitiveList/finalizers":[%q]}}`, v1alpha1.FinalizerDisk)),
		client.FieldOwner(v1alpha1.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizer of claim %s: %w", claim.Name, err)
	}
	return objects.Change(ctx, r.Client, before, func(id *v1alpha1.VMIdentity) {
		for _, name := range []string{v1alpha1.Finalizer, v1alpha1.FinalizerService,
			v1alpha1.FinalizerMove} {
			controllerutil.RemoveFinalizer(id, name)
		}
	})
}

// forsaken lets Kubernetes delete a claim whose identity does not exist: a user has removed the
// finalizers of the identity, or a backup has restored only the claim.
func (r *Reconciler) forsaken(ctx context.Context, identity client.ObjectKey) error {
	gone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: identity.Namespace,
		Name: identity.Name}}
	claim, err := objects.Claim(ctx, r.Client, gone)
	if claim == nil || claim.DeletionTimestamp == nil || err != nil {
		return err
	}
	now, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Live, "VMIdentity", identity)
	if now != nil || err != nil {
		return err // the cache is late
	}
	return r.releaseForsaken(ctx, gone, claim)
}

// releaseForsaken lets Kubernetes delete a claim whose identity is gone or does not know the secret
// yet. It deletes the identity's secret, which would block the next claim of that name. A running
// pod still needs the secret; its end triggers another reconcile.
func (r *Reconciler) releaseForsaken(ctx context.Context, gone *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim) error {
	pods, err := objects.PodsOf(ctx, r.Live, gone)
	if err != nil || objects.User(pods, gone) != "" {
		return err
	}
	err = deleteSecret(ctx, r.Client, gone, v1alpha1.SecretName(gone.Name))
	if err != nil {
		return err
	}
	return objects.ReleaseClaim(ctx, r.Client, claim)
}

// deleting records in the status what the deletion waits for.
func (r *Reconciler) deleting(ctx context.Context, before *v1alpha1.VMIdentity, m string) error {
	id := before.DeepCopy()
	id.Status.Ready = false
	id.Status.ObservedGeneration = id.Generation
	objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonDeleting, Message: m})
	return r.Report(ctx, before, id)
}
