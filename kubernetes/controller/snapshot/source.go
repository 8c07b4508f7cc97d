package snapshot

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Populator knows the sources of identities' claims.
type Populator struct{ Cache client.Reader }

// Source returns the VolumeSnapshot with the image of an identity, and the smallest size of a claim
// from it (0: any). A reason other than "" says that there is none yet, and message says why. When
// that changes, so does the status of the identity.
func (p *Populator) Source(ctx context.Context, id *v1alpha1.VMIdentity, class *string) (
	source *corev1.TypedObjectReference, atLeast resource.Quantity, reason, message string,
	err error) {
	c := apimeta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionPopulated)
	switch {
	case c == nil:
		return nil, atLeast, v1alpha1.ReasonPopulating, "the image is looked for in snapshots", nil
	case c.Status != metav1.ConditionTrue:
		return nil, atLeast, c.Reason, c.Message, nil
	}
	name := Name(id.Spec.Image, class)
	s := anyVolumeSnapshot()
	err = p.Cache.Get(ctx, client.ObjectKey{Namespace: id.Namespace, Name: name}, s)
	if client.IgnoreNotFound(err) != nil {
		return nil, atLeast, "", "", fmt.Errorf("VolumeSnapshot %s: %w", name, err)
	}
	ready, atLeast, _ := snapshotState(s)
	if err != nil || !ready || s.GetDeletionTimestamp() != nil {
		return nil, atLeast, v1alpha1.ReasonPopulating,
			fmt.Sprintf("VolumeSnapshot %s was deleted: it is made again", name), nil
	}
	group := snapshotKind.Group
	return &corev1.TypedObjectReference{APIGroup: &group, Kind: snapshotKind.Kind, Name: name},
		atLeast, "", "", nil
}
