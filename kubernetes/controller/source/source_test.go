package source

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

const image = "registry.example.com/fedora@sha256:" +
	"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"

// scene has what there is, from which a disk `clone` can begin. A test changes one of them.
type scene struct {
	clone, web *v1alpha1.VMIdentity
	webClaim   *corev1.PersistentVolumeClaim
	golden     *corev1.PersistentVolumeClaim // a person's
	snapshot   *v1alpha1.VMIdentitySnapshot
	class      *storagev1.StorageClass
	driver     *storagev1.CSIDriver
	pod        *corev1.Pod
}

func claimOf(name, size string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name,
		Annotations: map[string]string{annotationProvisioner: "csi.example.com"}}}
	c.Status.Phase = corev1.ClaimBound
	c.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	return c
}

var quantity = controllertest.Quantity

func newScene(from v1alpha1.DiskSource) *scene {
	now := metav1.Now()
	o := &scene{
		clone:    &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "clone"}},
		web:      &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "web-0", UID: "web"}},
		webClaim: claimOf("vmid-web-0", "11Gi"), golden: claimOf("golden", "12Gi"),
		snapshot: &v1alpha1.VMIdentitySnapshot{ObjectMeta: metav1.ObjectMeta{Name: "monday"}},
		class: &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "csi"},
			Provisioner: "csi.example.com"},
		driver: &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "csi.example.com"}},
		pod:    &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "other"}},
	}
	o.clone.Spec.Source = &from
	o.web.Spec.Image, o.web.Spec.Size = image, quantity("10Gi")
	o.web.Spec.CloneableBy = []string{"clone"}
	o.web.Status.CreationTime = &now
	o.webClaim.Labels = map[string]string{v1alpha1.LabelIdentity: "web-0"}
	o.webClaim.OwnerReferences = []metav1.OwnerReference{{Kind: "VMIdentity",
		APIVersion: v1alpha1.GroupVersion.String(), Name: "web-0", UID: "uid-2",
		Controller: new(true)}}
	o.snapshot.Status = v1alpha1.VMIdentitySnapshotStatus{ReadyToUse: true,
		VolumeSnapshotName: "vmsnap-monday", RestoreSize: quantity("13Gi"),
		Disk: &v1alpha1.SnapshotDisk{Image: image, Size: quantity("10Gi")}}
	if from.Claim == "" {
		o.clone.Spec.Image = image
	} else {
		o.clone.Spec.Population = v1alpha1.Snapshot
	}
	return o
}

// find makes the objects that are not nil, and returns the answer for the clone.
func (o *scene) find(t *testing.T) Answer {
	t.Helper()
	w := controllertest.New(t, nil, o.clone) // the first UID
	for _, one := range []struct {
		client.Object
		is bool
	}{{o.web, o.web != nil}, {o.webClaim, o.webClaim != nil}, {o.golden, o.golden != nil},
		{o.snapshot, o.snapshot != nil}, {o.class, o.class != nil}, {o.driver, o.driver != nil},
		{o.pod, o.pod != nil}} {
		if one.is {
			deleting := one.GetDeletionTimestamp() != nil
			one.SetDeletionTimestamp(nil)
			w.Make(t, one.Object)
			if deleting {
				require.NoError(t, w.Base.Delete(t.Context(), one.Object))
			}
		}
	}
	// A cache that does not know yet that a pod has left its gate.
	late := interceptor.NewClient(w.Client, interceptor.Funcs{List: func(ctx context.Context,
		c client.WithWatch, l client.ObjectList, opts ...client.ListOption) error {
		if _, pods := l.(*corev1.PodList); pods {
			return nil
		}
		return c.List(ctx, l, opts...)
	}})
	f := Finder{objects.Kit{Client: late, Live: w.Live}}
	a := testtool.Must(f.Find(t.Context(), o.clone, new("csi")))(t)
	require.Zero(t, w.Writes(), "looking changes nothing")
	return a
}

var (
	fromClaim    = v1alpha1.DiskSource{Claim: "golden"}
	fromIdentity = v1alpha1.DiskSource{Identity: "web-0"}
	fromSnapshot = v1alpha1.DiskSource{Snapshot: "monday"}
)

func TestWhatTheClaimIsMadeFrom(t *testing.T) {
	for from, want := range map[v1alpha1.DiskSource][3]string{
		fromClaim:    {"PersistentVolumeClaim", "golden", "12Gi"},
		fromIdentity: {"PersistentVolumeClaim", "vmid-web-0", "11Gi"},
		fromSnapshot: {"VolumeSnapshot", "vmsnap-monday", "13Gi"},
	} {
		a := newScene(from).find(t)
		require.Empty(t, a.Reason, a.Message)
		require.Equal(t, want, [3]string{a.From.Kind, a.From.Name, a.AtLeast.String()})
		require.Equal(t, from.Snapshot != "", a.From.APIGroup != nil)
	}
}

// ends marks an object that find deletes. A finalizer keeps it.
func ends(o client.Object) {
	now := metav1.Now()
	o.SetFinalizers([]string{"example.com/wait"})
	o.SetDeletionTimestamp(&now)
}

// runs makes a pod one that uses a claim, or is of an identity.
func runs(claim string, readOnly bool) func(o *scene) {
	return func(o *scene) {
		o.pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim,
				ReadOnly: readOnly}}}}
	}
}

// TestWhatIsNoSource: whatever is wrong with a source, nothing is made from it, and the message
// says what to do.
func TestWhatIsNoSource(t *testing.T) {
	for what, c := range map[string]struct {
		from         v1alpha1.DiskSource
		change       func(o *scene)
		reason, says string
	}{
		"no claim": {fromClaim, func(o *scene) { o.golden = nil }, v1alpha1.ReasonSourceMissing,
			"there is no claim golden in the namespace"},
		"a claim that goes": {fromClaim, func(o *scene) { ends(o.golden) },
			v1alpha1.ReasonSourceMissing, "is being deleted"},
		"a claim of another namespace": {fromClaim, func(o *scene) { o.golden.Namespace = "other" },
			v1alpha1.ReasonSourceMissing, "in the namespace"},
		"a block volume": {fromClaim, func(o *scene) {
			o.golden.Spec.VolumeMode = new(corev1.PersistentVolumeBlock)
		}, v1alpha1.ReasonInvalid, "no file disk.img"},
		"a claim without a volume": {fromClaim, func(o *scene) {
			o.golden.Status.Phase = corev1.ClaimPending
		}, v1alpha1.ReasonPopulating, "has no volume yet"},
		"a claim that a pod writes": {fromClaim, runs("golden", false), v1alpha1.ReasonSourceInUse,
			"pod other may write to the claim golden"},
		"a claim that a pod has made": {v1alpha1.DiskSource{Claim: "other-work"},
			func(o *scene) {
				o.golden.Name = "other-work"
				o.pod.Spec.Volumes = []corev1.Volume{{Name: "work",
					VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}}
			}, v1alpha1.ReasonSourceInUse, "pod other may write to the claim other-work"},
		"a claim that a pod reads": {fromClaim, runs("golden", true), "", ""},
		"a claim that a pod has written": {fromClaim, func(o *scene) {
			runs("golden", false)(o)
			o.pod.Status.Phase = corev1.PodSucceeded
		}, "", ""},
		"a claim of an identity": {v1alpha1.DiskSource{Claim: "vmid-web-0"}, func(*scene) {},
			v1alpha1.ReasonInvalid, "is of a VMIdentity"},
		"a claim of an identity without its label": {v1alpha1.DiskSource{Claim: "vmid-web-0"},
			func(o *scene) { o.webClaim.Labels, o.webClaim.OwnerReferences = nil, nil },
			v1alpha1.ReasonInvalid, "is of a VMIdentity"},
		"a claim of another provisioner": {fromClaim, func(o *scene) {
			o.golden.Annotations[annotationProvisioner] = "nfs.example.com"
		}, v1alpha1.ReasonInvalid, "on the storage of nfs.example.com"},
		"a class that cannot clone": {fromClaim, func(o *scene) { o.driver = nil },
			v1alpha1.ReasonInvalid, "cannot clone a disk: its provisioner csi.example.com"},
		"no class": {fromClaim, func(o *scene) { o.class = nil }, v1alpha1.ReasonInvalid,
			"only a StorageClass clones it"},
		"no identity": {fromIdentity, func(o *scene) { o.web = nil },
			v1alpha1.ReasonSourceMissing, "there is no VMIdentity web-0"},
		"an identity that goes": {fromIdentity, func(o *scene) { ends(o.web) },
			v1alpha1.ReasonSourceMissing, "is being deleted"},
		"an identity that does not agree": {fromIdentity, func(o *scene) {
			o.web.Spec.CloneableBy = []string{"clone2"}
		}, v1alpha1.ReasonNotCloneable, `add "clone" to its spec.cloneableBy`},
		"an identity for all": {fromIdentity, func(o *scene) {
			o.web.Spec.CloneableBy = []string{"*"}
		}, "", ""},
		"an identity without a disk": {fromIdentity, func(o *scene) {
			o.web.Status.CreationTime = nil
		}, v1alpha1.ReasonPopulating, "has no disk yet"},
		"a claim that is not the identity's": {fromIdentity, func(o *scene) {
			o.webClaim.OwnerReferences = nil
		}, v1alpha1.ReasonPopulating, "has no disk yet"},
		"a local disk": {fromIdentity, func(o *scene) { o.web.Spec.Type = v1alpha1.Local },
			v1alpha1.ReasonInvalid, "Local disks are not cloned"},
		"a disk that a machine uses": {fromIdentity, func(o *scene) {
			o.pod.Labels = map[string]string{v1alpha1.LabelIdentity: "web-0"}
		}, v1alpha1.ReasonSourceInUse, "from a VMIdentitySnapshot it begins at once"},
		"a disk that a pod has by itself": {fromIdentity, runs("vmid-web-0", false),
			v1alpha1.ReasonSourceInUse, "pod other uses the disk of VMIdentity web-0"},
		"a disk that a pod waits for": {fromIdentity, func(o *scene) {
			o.pod.Labels = map[string]string{v1alpha1.LabelIdentity: "web-0"}
			o.pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: v1alpha1.Gate}}
		}, "", ""},
		"another image": {fromIdentity, func(o *scene) { o.clone.Spec.Image = "" },
			v1alpha1.ReasonInvalid, "make one with the same image"},
		"another population": {fromIdentity, func(o *scene) {
			o.clone.Spec.Population = v1alpha1.Snapshot
		}, v1alpha1.ReasonInvalid, "has population Overlay, and this VMIdentity has Snapshot"},
		"other blocks": {fromIdentity, func(o *scene) { o.web.Spec.BlockSize = 4096 },
			v1alpha1.ReasonInvalid, "so make one with blockSize 4096"},
		"blocks that are not the source's": {fromIdentity, func(o *scene) {
			o.clone.Spec.BlockSize = 4096
		}, v1alpha1.ReasonInvalid, "so make one with blockSize 512"},
		"the same blocks": {fromIdentity, func(o *scene) {
			o.clone.Spec.BlockSize = 512
		}, "", ""},
		"a snapshot with other blocks": {fromSnapshot, func(o *scene) {
			o.snapshot.Status.Disk.BlockSize = 4096
		}, v1alpha1.ReasonInvalid, "has logical blocks of 4096 bytes"},
		"a smaller disk": {fromIdentity, func(o *scene) { o.clone.Spec.Size = quantity("9Gi") },
			v1alpha1.ReasonInvalid, "a disk never shrinks"},
		"a larger disk": {fromIdentity, func(o *scene) { o.clone.Spec.Size = quantity("90Gi") },
			"", ""},
		"itself": {v1alpha1.DiskSource{Identity: "clone"}, func(o *scene) {
			o.clone.Spec.CloneableBy = []string{"*"}
		}, v1alpha1.ReasonPopulating, "VMIdentity clone has no disk yet"},
		"no snapshot": {fromSnapshot, func(o *scene) { o.snapshot = nil },
			v1alpha1.ReasonSourceMissing, "there is no VMIdentitySnapshot monday"},
		"a snapshot that goes": {fromSnapshot, func(o *scene) { ends(o.snapshot) },
			v1alpha1.ReasonSourceMissing, "is being deleted"},
		"a snapshot that is not ready": {fromSnapshot, func(o *scene) {
			o.snapshot.Status.ReadyToUse = false
		}, v1alpha1.ReasonPopulating, "is not ready"},
		"a snapshot of another image": {fromSnapshot, func(o *scene) {
			o.snapshot.Status.Disk.Image = "other"
		}, v1alpha1.ReasonInvalid, "has image other"},
		"a snapshot of a larger disk": {fromSnapshot, func(o *scene) {
			o.clone.Spec.Size = quantity("1Gi")
		}, v1alpha1.ReasonInvalid, "a disk never shrinks"},
	} {
		t.Run(what, func(t *testing.T) {
			o := newScene(c.from)
			c.change(o)
			a := o.find(t)
			require.Equal(t, c.reason, a.Reason, a.Message)
			require.Contains(t, a.Message, c.says)
			require.Equal(t, c.reason == "", a.From != nil)
		})
	}
}

// TestGone: what Find answers with is missed when it has gone.
func TestGone(t *testing.T) {
	for _, from := range []v1alpha1.DiskSource{fromClaim, fromIdentity, fromSnapshot} {
		o := newScene(from)
		claim := &corev1.PersistentVolumeClaim{}
		claim.Spec.DataSourceRef = o.find(t).From
		w := controllertest.New(t, nil)
		f := Finder{objects.Kit{Client: w.Client, Live: w.Live}}
		a := testtool.Must(f.Gone(t.Context(), o.clone, claim))(t)
		require.Equal(t, v1alpha1.ReasonSourceMissing, a.Reason)
		require.Contains(t, a.Message, from.String()+", from which the disk begins, was deleted")
	}
}
