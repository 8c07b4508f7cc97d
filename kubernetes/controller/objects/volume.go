package objects

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
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

// BoundTo reports whether a volume, which may be nil, belongs to a claim according to Kubernetes. A
// claim may name any volume in its spec, so that says nothing.
func BoundTo(v *corev1.PersistentVolume, claim types.UID) bool {
	return v != nil && claim != "" && v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == claim
}
