package objects

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Volume returns the volume with a name and a UID ("": any), or nil.
func Volume(ctx context.Context, from client.Reader, name string, uid types.UID) (
	*corev1.PersistentVolume, error) {
	v, err := Find[corev1.PersistentVolume](ctx, from, "volume", client.ObjectKey{Name: name})
	if v == nil || uid != "" && v.UID != uid {
		return nil, err
	}
	return v, nil
}

// Claim returns the claim of an identity, or nil.
func Claim(ctx context.Context, from client.Reader, id *v1alpha1.VMIdentity) (
	*corev1.PersistentVolumeClaim, error) {
	return Find[corev1.PersistentVolumeClaim](ctx, from, "claim", client.ObjectKey{
		Namespace: id.Namespace, Name: v1alpha1.ClaimName(id.Name)})
}

// DeleteClaim deletes a claim whose disk may go. Kubernetes keeps it while a pod has it.
func DeleteClaim(ctx context.Context, c client.Client, claim *corev1.PersistentVolumeClaim) error {
	if err := ReleaseClaim(ctx, c, claim); err != nil || claim.DeletionTimestamp != nil {
		return err
	}
	err := c.Delete(ctx, claim, client.Preconditions{UID: &claim.UID})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("claim %s: %w", claim.Name, err)
	}
	return nil
}

// ReleaseClaim lets Kubernetes delete a claim, now or when somebody asks for it.
func ReleaseClaim(ctx context.Context, c client.Client,
	claim *corev1.PersistentVolumeClaim) error {
	if !controllerutil.ContainsFinalizer(claim, v1alpha1.FinalizerDisk) {
		return nil
	}
	if err := Change(ctx, c, claim, func(claim *corev1.PersistentVolumeClaim) {
		controllerutil.RemoveFinalizer(claim, v1alpha1.FinalizerDisk)
	}); err != nil {
		return fmt.Errorf("finalizer of claim %s: %w", claim.Name, err)
	}
	return nil
}

// BoundTo reports whether a volume, which may be nil, belongs to a claim according to Kubernetes. A
// claim may name any volume in its spec, so that says nothing.
func BoundTo(v *corev1.PersistentVolume, claim types.UID) bool {
	return v != nil && claim != "" && v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == claim
}
