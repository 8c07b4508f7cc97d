package objects

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
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
	return ClaimOf(ctx, from, id.Namespace, v1alpha1.ClaimName(id.Name))
}

// ClaimOf returns the claim of a namespace with a name, or nil.
func ClaimOf(ctx context.Context, from client.Reader, namespace, name string) (
	*corev1.PersistentVolumeClaim, error) {
	return Find[corev1.PersistentVolumeClaim](ctx, from, "claim",
		client.ObjectKey{Namespace: namespace, Name: name})
}

// Room in a claim in addition to the disk: a sixteenth of the disk for the file system, and up to
// 64 MiB each for the map of the overlay and the state of the disk.
const (
	fileSystemShare = 16
	roomForState    = 128 << 20
	mebibyte        = 1 << 20
)

// SizeOfClaim is the smallest size of a claim for a disk: the disk and the room for its files, in
// whole MiB.
func (k Kit) SizeOfClaim(disk *v1alpha1.DiskSpec) resource.Quantity {
	if disk.Size == nil {
		return k.Options.ClaimSize.DeepCopy()
	}
	size := disk.Size.Value()
	size += size/fileSystemShare + roomForState
	size = (size + mebibyte - 1) / mebibyte * mebibyte
	return *resource.NewQuantity(size, resource.BinarySI)
}

// DeleteClaim deletes a claim whose disk is not needed. Kubernetes keeps it while a pod has it.
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

// ReleaseClaim lets Kubernetes delete a claim, now or after a request.
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

// BoundTo reports whether a volume, which may be nil, belongs to a claim according to Kubernetes.
// The claim's own spec does not prove this, because it may name any volume.
func BoundTo(v *corev1.PersistentVolume, claim types.UID) bool {
	return v != nil && claim != "" && v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == claim
}
