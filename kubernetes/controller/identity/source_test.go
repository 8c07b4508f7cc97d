package identity

import (
	"context"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// cloning is a world in which identity vm begins from a source.
func cloning(t *testing.T, from v1alpha1.DiskSource, others ...client.Object) *world {
	t.Helper()
	class := controllertest.Class("csi")
	class.Provisioner = "csi.example.com"
	return newWorld(t, v1alpha1.DiskSpec{Source: &from, StorageClassName: &class.Name,
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
	w.settles("Ready", "False SourceMissing", "there is no claim golden")
	require.Equal(t, []string{"Warning SourceMissing"}, w.Events())
	golden := bound("golden")
	w.Make(t, golden)
	w.settles("Ready", "True Ready", "")
	claim := w.claim()
	require.Equal(t, "golden", claim.Spec.DataSourceRef.Name)
	require.Equal(t, "30Gi", claim.Spec.Resources.Requests.Storage().String())
	require.Equal(t, "Source claim/golden", claim.Annotations[v1alpha1.AnnotationContent])

	require.NoError(t, w.Base.Delete(t.Context(), golden))
	w.settles("Ready", "False SourceMissing", "was deleted before the disk had its volume")
	w.bind("30Gi")
	w.settles("Ready", "True Ready", "")
}

// TestSourceStays: an identity goes after the disks that begin from it have their volumes. That one
// has a claim counts also while its status does not say so yet.
func TestSourceStays(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Image: "a"})
	clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}}
	clone.Spec.Source = &v1alpha1.DiskSource{Identity: "vm"}
	w.Make(t, clone)
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: (&Reconciler{}).newClaim(clone, nil).ObjectMeta}
	w.Make(t, claim)
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	r := &Reconciler{w.kit()}
	r.Live = noClaims{w.Live}
	require.ErrorIs(t, testtool.Err(r.Reconcile(t.Context(), reconcile.Request{
		NamespacedName: client.ObjectKeyFromObject(w.identity())})), io.ErrUnexpectedEOF)
	w.require("Ready", "True Ready", "") // nothing is known
	w.settles("Ready", "False Deleting", "VMIdentity clone begins from this disk")
	w.claim()
	meta.SetStatusCondition(&clone.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionBound, Status: metav1.ConditionTrue, Reason: "x"})
	require.NoError(t, w.Base.Status().Update(t.Context(), clone))
	w.settle()
	require.False(t, w.get("vmid-vm", &corev1.PersistentVolumeClaim{}))
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
}

// noClaims cannot read claims.
type noClaims struct{ client.Reader }

func (r noClaims) Get(ctx context.Context, key client.ObjectKey, o client.Object,
	options ...client.GetOption) error {
	if _, ok := o.(*corev1.PersistentVolumeClaim); ok {
		return io.ErrUnexpectedEOF
	}
	return r.Reader.Get(ctx, key, o, options...)
}

// TestSourceGoes: a disk that has no claim yet does not keep that from which it would begin: it
// gets none while that goes. Nor does a disk that has lost its claim, or the volume of that.
func TestSourceGoes(t *testing.T) {
	for what, phase := range map[string]corev1.PersistentVolumeClaimPhase{
		"no claim yet": corev1.ClaimPending, "no volume any more": corev1.ClaimLost,
		"no claim any more": ""} {
		w := settled(t, v1alpha1.DiskSpec{Image: "a"})
		clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}}
		clone.Spec.Source = &v1alpha1.DiskSource{Identity: "vm"}
		w.Make(t, clone)
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-clone"}}
		if phase != corev1.ClaimPending {
			clone.Status.ClaimName = claim.Name
			require.NoError(t, w.Base.Status().Update(t.Context(), clone))
			claim.ObjectMeta = (&Reconciler{}).newClaim(clone, nil).ObjectMeta
		}
		claim.Status.Phase = phase
		if phase != "" {
			w.Make(t, claim)
		}
		require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
		w.settle()
		require.False(t, w.get("vm", &v1alpha1.VMIdentity{}), what)
	}
}

// TestSourceLost: a disk whose claim is gone is kept for no clone: that gets no volume any more.
func TestSourceLost(t *testing.T) {
	w := settled(t, v1alpha1.DiskSpec{Image: "a"})
	clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}}
	clone.Spec.Source = &v1alpha1.DiskSource{Identity: "vm"}
	w.Make(t, clone)
	w.Make(t, &corev1.PersistentVolumeClaim{
		ObjectMeta: (&Reconciler{}).newClaim(clone, nil).ObjectMeta})
	require.NoError(t, w.Base.Delete(t.Context(), w.claim()))
	w.settles("Ready", "False ClaimMissing", "")
	require.NoError(t, w.Base.Delete(t.Context(), w.identity()))
	w.settle()
	require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
}

// snapshots has the VolumeSnapshot of an image, or not.
type snapshots struct {
	client.Reader
	name string
	gone bool
}

func (s *snapshots) Get(_ context.Context, key client.ObjectKey, o client.Object,
	_ ...client.GetOption) error {
	if s.gone || key.Name != s.name {
		return apierrors.NewNotFound(corev1.Resource("volumesnapshots"), key.Name)
	}
	o.(*unstructured.Unstructured).Object["status"] = map[string]any{"readyToUse": true,
		"restoreSize": "30Gi"}
	return nil
}

// ofImage is a world in which identity vm begins from the VolumeSnapshot of its image.
func ofImage(t *testing.T) (*world, *snapshots) {
	t.Helper()
	w := newWorld(t, v1alpha1.DiskSpec{Image: "a", Population: v1alpha1.Snapshot})
	s := &snapshots{name: source.Golden("a", new("default"))}
	w.snapshots = s
	w.settles("Ready", "False Populating", "the image is looked for")
	id := w.identity()
	meta.SetStatusCondition(&id.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionPopulated, Status: metav1.ConditionTrue, Reason: "x"})
	require.NoError(t, w.Base.Status().Update(t.Context(), id))
	w.settles("Ready", "True Ready", "")
	require.Equal(t, s.name, w.claim().Spec.DataSourceRef.Name)
	require.Equal(t, "30Gi", w.claim().Spec.Resources.Requests.Storage().String())
	return w, s
}

// TestSnapshotGoes: a claim without a volume whose snapshot has gone gets none. Once it has its
// volume, it needs no snapshot.
func TestSnapshotGoes(t *testing.T) {
	w, s := ofImage(t)
	s.gone = true
	w.settles("Ready", "False Populating", "it is made again")
	s.gone = false
	w.settles("Ready", "True Ready", "")
	w.bind("30Gi")
	s.gone = true
	w.settles("Ready", "True Ready", "")
}

// TestSnapshotOfDefaultClass: the API server gives a claim without a class the default one. The
// disk still begins from the snapshot that its claim names, and its first pod, which this class may
// wait for, can start.
func TestSnapshotOfDefaultClass(t *testing.T) {
	w, _ := ofImage(t)
	claim := w.claim()
	claim.Spec.StorageClassName = new("nvme")
	require.NoError(t, w.Base.Update(t.Context(), claim))
	w.settles("Ready", "True Ready", "")
}

// TestSourceOfBackup: a claim that a backup restores from a source of its own is ready before it
// has its volume, whatever the disk began from: its class may wait for the first pod.
func TestSourceOfBackup(t *testing.T) {
	for _, spec := range []v1alpha1.DiskSpec{
		{Image: "a", Population: v1alpha1.Overlay},
		{Image: "a", Population: v1alpha1.Snapshot},
		{Source: &v1alpha1.DiskSource{Claim: "gone"}, Population: v1alpha1.Snapshot},
		{Image: "a", Source: &v1alpha1.DiskSource{Identity: "gone"}},
		{Image: "a", Source: &v1alpha1.DiskSource{Snapshot: "gone"}},
	} {
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "vmid-vm",
			Annotations: map[string]string{v1alpha1.AnnotationContent: spec.Content()}}}
		claim.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "VolumeSnapshot",
			Name: "velero-1", APIGroup: &source.SnapshotKind.Group}
		w := newWorld(t, spec, claim)
		w.snapshots = &snapshots{}
		w.settles("Ready", "True Ready", "")
	}
}

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
