package identity

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// cloning is a world in which identity vm begins from a source.
func cloning(t *testing.T, source v1alpha1.DiskSource, others ...client.Object) *world {
	t.Helper()
	class := controllertest.Class("csi")
	class.Provisioner = "csi.example.com"
	return newWorld(t, v1alpha1.DiskSpec{Source: &source, StorageClassName: &class.Name,
		Population: v1alpha1.Snapshot}, append(others, class,
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "csi.example.com"}})...)
}

func bound(name string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
	c.Status.Phase = corev1.ClaimBound
	c.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("30Gi")}
	return c
}

// TestFromSource: the claim is made from the source and is as large, and needs no snapshot of an
// image. When the source goes before the claim has its volume, the identity says so.
func TestFromSource(t *testing.T) {
	w := cloning(t, v1alpha1.DiskSource{Claim: "golden"})
	w.settle()
	w.require("Ready", "False SourceMissing", "there is no claim golden")
	require.Equal(t, []string{"Warning SourceMissing"}, w.Events())
	golden := bound("golden")
	w.Make(t, golden)
	w.settle()
	w.require("Ready", "True Ready", "")
	claim := w.claim()
	require.Equal(t, "golden", claim.Spec.DataSourceRef.Name)
	require.Equal(t, "30Gi", claim.Spec.Resources.Requests.Storage().String())
	require.Equal(t, "Source claim/golden", claim.Annotations[v1alpha1.AnnotationContent])

	require.NoError(t, w.Base.Delete(t.Context(), golden))
	w.settle()
	w.require("Ready", "False SourceMissing", "was deleted before the disk had its volume")
	w.bind("30Gi")
	w.settle()
	w.require("Ready", "True Ready", "")
}

// TestSourceStays: an identity goes after the disks that begin from it have their volumes. That one
// has a claim counts also while its status does not say so yet.
func TestSourceStays(t *testing.T) {
	w := newWorld(t, v1alpha1.DiskSpec{Image: "a"})
	w.settle()
	clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}}
	clone.Spec.Source = &v1alpha1.DiskSource{Identity: "vm"}
	w.Make(t, clone)
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: (&Reconciler{}).newClaim(clone, nil).ObjectMeta}
	w.Make(t, claim)
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	w.settle()
	w.require("Ready", "False Deleting", "VMIdentity clone begins from this disk")
	w.claim()
	clone.Status.ClaimName = "vmid-clone"
	require.NoError(t, w.Base.Status().Update(t.Context(), clone))
	require.NoError(t, w.Base.Delete(t.Context(), claim))
	w.settle()
	w.require("Ready", "False Deleting", "VMIdentity clone begins from this disk")
	meta.SetStatusCondition(&clone.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionBound, Status: metav1.ConditionTrue, Reason: "x"})
	require.NoError(t, w.Base.Status().Update(t.Context(), clone))
	w.settle()
	require.False(t, w.get("vmid-vm", &corev1.PersistentVolumeClaim{}))
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
}

// TestSourceGoes: a disk that has no claim yet does not keep that from which it would begin: it
// gets none while that goes.
func TestSourceGoes(t *testing.T) {
	w := newWorld(t, v1alpha1.DiskSpec{Image: "a"})
	w.settle()
	clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}}
	clone.Spec.Source = &v1alpha1.DiskSource{Identity: "vm"}
	w.Make(t, clone)
	w.Make(t, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-clone"}})
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	w.settle()
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
}

// golden is a Populator whose snapshot is there, or not.
type golden struct{ gone bool }

func (g *golden) Source(context.Context, *v1alpha1.VMIdentity, *string) (
	*corev1.TypedObjectReference, resource.Quantity, string, string, error) {
	if g.gone {
		return nil, resource.Quantity{}, v1alpha1.ReasonPopulating, "it is made again", nil
	}
	group := "snapshot.storage.k8s.io"
	return &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeSnapshot",
		Name: "golden"}, resource.Quantity{}, "", "", nil
}

// TestSnapshotGoes: a claim without a volume whose snapshot has gone gets none. Once it has its
// volume, it needs no snapshot.
func TestSnapshotGoes(t *testing.T) {
	w := newWorld(t, v1alpha1.DiskSpec{Image: "a", Population: v1alpha1.Snapshot})
	g := &golden{}
	w.options.Populator = g
	w.settle()
	w.require("Ready", "True Ready", "")
	g.gone = true
	w.settle()
	w.require("Ready", "False Populating", "it is made again")
	g.gone = false
	w.settle()
	w.require("Ready", "True Ready", "")
	w.bind("30Gi")
	g.gone = true
	w.settle()
	w.require("Ready", "True Ready", "")
}
