package identity

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// grow asks for a larger claim when the identity's size has grown. Meanwhile the disk can be used,
// even if the claim cannot grow.
func (r *Reconciler) grow(ctx context.Context, id *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim) (*verdict, error) {
	ready := &verdict{ready: true, reason: v1alpha1.ReasonReady,
		message: "a pod can use the disk"}
	want := r.SizeOfClaim(&id.Spec.DiskSpec)
	has := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	if id.Spec.Size == nil || has.Cmp(want) >= 0 {
		return resizing(ready, claim), nil
	}
	if claim.Status.Phase != corev1.ClaimBound {
		// Until then the API server refuses another size.
		ready.reason = v1alpha1.ReasonResizing
		ready.message = fmt.Sprintf("a pod can use the disk; the claim %s grows to %s when it has "+
			"its volume", claim.Name, &want)
		return ready, nil
	}
	// With its UID, a lost claim is not made again, and no other claim is changed.
	err := objects.Apply(ctx, r.Client, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
		Spec: corev1.PersistentVolumeClaimSpec{Resources: corev1.VolumeResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceStorage: want}}},
	})
	reason, message := objects.Refused(err, fmt.Sprintf("that the claim %s grows to %s", claim.Name,
		&want))
	switch {
	case reason != "":
		ready.reason, ready.poll = v1alpha1.ReasonResizeRefused, true
		ready.message = "a pod can use the disk with the size it has; " + message
		return ready, nil
	case err != nil:
		return ready, fmt.Errorf("claim %s to %s: %w", claim.Name, &want, err)
	}
	claim.Spec.Resources.Requests[corev1.ResourceStorage] = want
	return resizing(ready, claim), nil
}

// resizing reports whether the volume of a claim is still smaller than the claim requests.
func resizing(ready *verdict, claim *corev1.PersistentVolumeClaim) *verdict {
	want := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	has, bound := claim.Status.Capacity[corev1.ResourceStorage]
	if bound && has.Cmp(want) < 0 {
		ready.reason = v1alpha1.ReasonResizing
		ready.message = fmt.Sprintf("a pod can use the disk; the claim %s grows from %s to %s, "+
			"often not before a pod starts with it", claim.Name, &has, &want)
	}
	return ready
}
