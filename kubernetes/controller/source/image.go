package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// SnapshotKind is the kind of VolumeSnapshots, whose CRD comes with a CSI driver. They have no Go
// type here.
var SnapshotKind = schema.GroupVersionKind{Group: "snapshot.storage.k8s.io", Version: "v1",
	Kind: "VolumeSnapshot"}

// NewSnapshot returns an empty VolumeSnapshot, for example to read one into.
func NewSnapshot() *unstructured.Unstructured {
	s := &unstructured.Unstructured{}
	s.SetGroupVersionKind(SnapshotKind)
	return s
}

// SnapshotState returns the driver's state of a VolumeSnapshot: that it is ready, with the smallest
// size of a claim from it (0: unknown), or an error of the driver.
func SnapshotState(s *unstructured.Unstructured) (ready bool, size resource.Quantity,
	wrong string) {
	ready, _, _ = unstructured.NestedBool(s.Object, "status", "readyToUse")
	wrong, _, _ = unstructured.NestedString(s.Object, "status", "error", "message")
	if text, ok, _ := unstructured.NestedString(s.Object, "status", "restoreSize"); ok {
		if q, err := resource.ParseQuantity(text); err == nil {
			size = q
		}
	}
	return ready, size, wrong
}

// OfImage reports whether the claim of a disk is made from a VolumeSnapshot of its image.
func OfImage(disk *v1alpha1.DiskSpec) bool {
	return disk.Population == v1alpha1.Snapshot && disk.Source == nil
}

const goldenPrefix = "golden-"

// Golden is the name of the VolumeSnapshot of an image for a storage class (nil: none, not even a
// default one) in one namespace, and of the objects that make it. It depends on the image's digest,
// not on its registry.
func Golden(image string, class *string) string {
	key := v1alpha1.DigestOf(image) + "\ndefault"
	if class != nil {
		key = v1alpha1.DigestOf(image) + "\nclass " + *class
	}
	sum := sha256.Sum256([]byte(key))
	return goldenPrefix + hex.EncodeToString(sum[:10])
}

// fromImage returns the VolumeSnapshot of the image of an identity, which has this name. Package
// snapshot makes it, and writes condition Populated when it is ready.
func (f Finder) fromImage(ctx context.Context, id *v1alpha1.VMIdentity, name string) (Answer,
	error) {
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionPopulated)
	switch {
	case f.Snapshots == nil:
		return not(v1alpha1.ReasonInvalid, "this controller has no snapshots: set population to "+
			"Overlay in another VMIdentitySet")
	case c == nil:
		return not(v1alpha1.ReasonPopulating, "the image is looked for in snapshots")
	case c.Status != metav1.ConditionTrue:
		return not(c.Reason, "%s", c.Message)
	}
	s := NewSnapshot()
	err := f.Snapshots.Get(ctx, client.ObjectKey{Namespace: id.Namespace, Name: name}, s)
	if client.IgnoreNotFound(err) != nil {
		return Answer{}, fmt.Errorf("VolumeSnapshot %s: %w", name, err)
	}
	ready, size, _ := SnapshotState(s)
	if err != nil || !ready || s.GetDeletionTimestamp() != nil {
		return not(v1alpha1.ReasonPopulating, "VolumeSnapshot %s was deleted: it is made again",
			name)
	}
	return Answer{From: fromVolumeSnapshot(name), AtLeast: size}, nil
}

func fromVolumeSnapshot(name string) *corev1.TypedObjectReference {
	return &corev1.TypedObjectReference{APIGroup: &SnapshotKind.Group, Kind: SnapshotKind.Kind,
		Name: name}
}
