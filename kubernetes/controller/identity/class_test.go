package identity

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestClassMissing: an identity whose claim can never get a volume is not ready, until somebody
// makes the class. Its claim is there all the same, so that a volume made by hand can have it.
func TestClassMissing(t *testing.T) {
	name, none := "fast", ""
	for what, c := range map[string]struct {
		spec v1alpha1.DiskSpec
		says string
	}{
		"a class that does not exist": {v1alpha1.DiskSpec{StorageClassName: &name},
			"there is no StorageClass fast: make it, or make another VMIdentity"},
		"a usage type whose class does not exist": {v1alpha1.DiskSpec{UsageType: "quick"},
			"there is no StorageClass fast"},
		"no default class":                   {v1alpha1.DiskSpec{}, "no default StorageClass"},
		"only volumes that are made by hand": {v1alpha1.DiskSpec{StorageClassName: &none}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, c.spec)
			w.options.UsageTypes["quick"] = name
			require.NoError(t, w.Base.Delete(t.Context(), controllertest.DefaultClass()))
			w.settle()
			if c.says == "" {
				w.require("Ready", "True Ready", "")
				return
			}
			w.require("Ready", "False ClassMissing", c.says)
			require.Equal(t, []string{"Warning ClassMissing"}, w.Events())
			before := w.claim()

			r := &Reconciler{w.kit()}
			asked := []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(w.identity())}}
			made := controllertest.DefaultClass()
			if c.spec.StorageClassName != nil || c.spec.UsageType != "" {
				made = controllertest.Class(name)
			}
			w.Make(t, made)
			require.Equal(t, asked, r.unbound(t.Context(), made), "it is looked at again")
			w.settles("Ready", "True Ready", "")
			require.Equal(t, before.UID, w.claim().UID)

			require.NoError(t, w.Base.Delete(t.Context(), made))
			w.settles("Ready", "False ClassMissing", c.says)
			w.bind("20Gi") // to a volume that was made by hand
			w.settles("Ready", "True Ready", "")
			require.Empty(t, r.unbound(t.Context(), made))
		})
	}
}

// TestClassOfRestoredClaim: a claim that names its volume needs no class.
func TestClassOfRestoredClaim(t *testing.T) {
	gone := "gone"
	spec := v1alpha1.DiskSpec{StorageClassName: &gone}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm",
		Annotations: map[string]string{v1alpha1.AnnotationContent: spec.Content()}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &gone, VolumeName: "restored",
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: resource.MustParse("20Gi")}}}}
	w := settled(t, spec, claim)
	w.require("Ready", "True Ready", "")
}

// TestClassOfSnapshot: the claim that is filled for a snapshot would have no volume either, so
// nobody waits for it.
func TestClassOfSnapshot(t *testing.T) {
	gone := "gone"
	w := newWorld(t, v1alpha1.DiskSpec{StorageClassName: &gone, Population: v1alpha1.Snapshot})
	w.snapshots = w.Client
	w.settles("Ready", "False ClassMissing", "there is no StorageClass gone")
	require.Zero(t, w.Made("PersistentVolumeClaim"))
}
