package snapshot

import (
	"testing"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// kept is a world with an identity vm1, its claim, and a VMIdentitySnapshot of it.
type kept struct {
	t *testing.T
	client.WithWatch
	calls  *controllertest.Calls
	r      *Disks
	events chan string
}

func newKept(t *testing.T, calls *controllertest.Calls) *kept {
	t.Helper()
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "vm1",
		UID: "vm1"}}
	id.Spec.Image, id.Spec.Population = image, v1alpha1.Snapshot
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
		Name: "vmid-vm1", OwnerReferences: []metav1.OwnerReference{{Kind: "VMIdentity", Name: "vm1",
			APIVersion: v1alpha1.GroupVersion.String(), UID: "vm1", Controller: new(true)}}}}
	claim.Status.Phase = corev1.ClaimBound
	s := &v1alpha1.VMIdentitySnapshot{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
		Name: "monday", UID: "monday"}}
	s.Spec.IdentityName = "vm1"
	k := &kept{t: t, calls: calls, events: make(chan string, 1000)}
	k.WithWatch = fake.NewClientBuilder().WithScheme(scheme).WithObjects(id, claim, s).
		WithStatusSubresource(&v1alpha1.VMIdentity{}, &v1alpha1.VMIdentitySnapshot{}).Build()
	role := controllertest.RoleOf(t, controllertest.Settings{Snapshots: true})
	c := role.Cache(calls.Client(k.WithWatch))
	k.r = &Disks{objects.Kit{Client: c, Snapshots: c, Live: role.Live(calls.Client(k.WithWatch)),
		Events:  &events.FakeRecorder{Events: k.events},
		Options: objects.Options{SnapshotClass: "fast"}}}
	return k
}

func (k *kept) settle() ctrl.Result {
	k.t.Helper()
	return k.calls.Settle(k.t, k.r, nil, client.ObjectKey{Namespace: "default", Name: "monday"})
}

func (k *kept) snapshot() *v1alpha1.VMIdentitySnapshot {
	k.t.Helper()
	return controllertest.Get(k.t, k, "default", "monday", &v1alpha1.VMIdentitySnapshot{})
}

// require compares the statuses of Ready, Progressing and Failure, and a part of their message.
func (k *kept) require(ready, progressing, failure bool, reason, says string) {
	k.t.Helper()
	s := k.snapshot()
	require.Equal(k.t, ready, s.Status.ReadyToUse)
	for name, want := range map[string]bool{"Ready": ready, "Progressing": progressing,
		"Failure": failure} {
		c := apimeta.FindStatusCondition(s.Status.Conditions, name)
		require.NotNil(k.t, c, name)
		require.Equal(k.t, want, c.Status == metav1.ConditionTrue, "%s: %s", name, c.Message)
		require.Equal(k.t, reason, c.Reason, c.Message)
		require.Contains(k.t, c.Message, says)
	}
}

// driver is what the driver says of the VolumeSnapshot.
func (k *kept) driver(status map[string]any) {
	k.t.Helper()
	v := source.NewSnapshot()
	controllertest.Get(k.t, k, "default", "vmsnap-monday", v)
	v.Object["status"] = status
	require.NoError(k.t, k.Update(k.t.Context(), v))
}

// TestKeepDisk: whichever request fails, there is one VolumeSnapshot of the claim, and the status
// says what the driver says.
func TestKeepDisk(t *testing.T) {
	controllertest.EachWriteFault(t, func(t *testing.T, calls *controllertest.Calls) {
		k := newKept(t, calls)
		k.settle()
		k.require(false, true, false, "Taking", "is being taken")
		v := source.NewSnapshot()
		controllertest.Get(t, k, "default", "vmsnap-monday", v)
		require.True(t, metav1.IsControlledBy(v, k.snapshot()), "it goes with the snapshot")
		spec, _, _ := unstructured.NestedMap(v.Object, "spec")
		require.Equal(t, map[string]any{"volumeSnapshotClassName": "fast", "source": map[string]any{
			"persistentVolumeClaimName": "vmid-vm1"}}, spec)
		k.driver(map[string]any{"readyToUse": false, "error": map[string]any{
			"time": "2026-11-01T10:00:00Z", "message": "the pool is full"}})
		k.settle()
		k.require(false, false, true, "Failed", "the pool is full")
		require.Equal(t, "the pool is full", k.snapshot().Status.Error.Message)
		require.Equal(t, 2026, k.snapshot().Status.Error.Time.Year())
		k.driver(map[string]any{"readyToUse": true, "restoreSize": "20Gi",
			"creationTime": "2026-11-01T10:00:01Z"})
		// The identity may be gone by now: the status knows what it was.
		require.NoError(t, k.Delete(t.Context(), &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "vm1"}}))
		k.settle()
		k.require(true, false, false, "Ready", "VolumeSnapshot vmsnap-monday has the disk")
		s := k.snapshot().Status
		require.Nil(t, s.Error)
		require.Equal(t, "20Gi", s.RestoreSize.String())
		require.Equal(t, 1, s.CreationTime.Second())
		require.Equal(t, v1alpha1.SnapshotDisk{Image: image, Population: v1alpha1.Snapshot},
			*s.Disk)
	})
}

// TestKeepDiskWaits: nothing is made from what is not the disk of the identity.
func TestKeepDiskWaits(t *testing.T) {
	for what, c := range map[string]struct {
		change       func(k *kept, id *v1alpha1.VMIdentity, claim *corev1.PersistentVolumeClaim)
		failed       bool
		reason, says string
	}{
		"no VolumeSnapshots": {func(k *kept, _ *v1alpha1.VMIdentity,
			_ *corev1.PersistentVolumeClaim) {
			k.r.Snapshots = nil
		}, true, "Invalid", "install their CRDs"},
		"no identity": {func(k *kept, id *v1alpha1.VMIdentity, _ *corev1.PersistentVolumeClaim) {
			require.NoError(k.t, k.Delete(k.t.Context(), id))
		}, true, "IdentityMissing", "there is no VMIdentity vm1"},
		"a local disk": {func(k *kept, id *v1alpha1.VMIdentity, _ *corev1.PersistentVolumeClaim) {
			id.Spec.Type = v1alpha1.Local
			require.NoError(k.t, k.Update(k.t.Context(), id))
		}, true, "Invalid", "Local disks have no snapshots"},
		"no volume": {func(k *kept, _ *v1alpha1.VMIdentity, claim *corev1.PersistentVolumeClaim) {
			claim.Status.Phase = corev1.ClaimPending
			require.NoError(k.t, k.Status().Update(k.t.Context(), claim))
		}, false, "Taking", "has no volume yet"},
		"a claim of somebody else": {func(k *kept, _ *v1alpha1.VMIdentity,
			claim *corev1.PersistentVolumeClaim) {
			claim.OwnerReferences = nil
			require.NoError(k.t, k.Update(k.t.Context(), claim))
		}, false, "Taking", "has no volume yet"},
	} {
		t.Run(what, func(t *testing.T) {
			k := newKept(t, new(controllertest.Calls))
			c.change(k, controllertest.Get(t, k, "default", "vm1", &v1alpha1.VMIdentity{}),
				controllertest.Get(t, k, "default", "vmid-vm1", &corev1.PersistentVolumeClaim{}))
			k.settle()
			k.require(false, !c.failed, c.failed, c.reason, c.says)
			require.False(t, controllertest.There(t, k, "default", "vmsnap-monday",
				source.NewSnapshot()))
			require.Len(t, k.events, map[bool]int{true: 1}[c.failed])
		})
	}
}

// TestKeptDiskOfAnother: what was noted of an earlier VMIdentity of the name is noted again.
func TestKeptDiskOfAnother(t *testing.T) {
	is := v1alpha1.SnapshotDisk{Image: image, Population: v1alpha1.Snapshot}
	for _, was := range []v1alpha1.SnapshotDisk{{Image: "registry.example.com/before"},
		{Image: image, Population: v1alpha1.Snapshot, BlockSize: 4096}} {
		k := newKept(t, new(controllertest.Calls))
		s := k.snapshot()
		s.Status.VolumeSnapshotName, s.Status.Disk = "vmsnap-monday", &was
		require.NoError(t, k.Status().Update(t.Context(), s))
		k.settle()
		require.Equal(t, is, *k.snapshot().Status.Disk)
		require.True(t, controllertest.There(t, k, "default", "vmsnap-monday",
			source.NewSnapshot()))
	}
}

// TestKeptDiskIsTold: a VolumeSnapshot of somebody else is left alone, and one that was deleted is
// not made again: it would have another point in time.
func TestKeptDiskIsTold(t *testing.T) {
	k := newKept(t, new(controllertest.Calls))
	require.NoError(t, k.Create(t.Context(), newVolumeSnapshot(metav1.ObjectMeta{
		Namespace: "default", Name: "vmsnap-monday"}, "db", "")))
	require.NotZero(t, k.settle().RequeueAfter, "nobody tells that it has gone")
	k.require(false, false, true, "Invalid", "that is not of this VMIdentitySnapshot")

	k = newKept(t, new(controllertest.Calls))
	k.settle()
	k.driver(map[string]any{"readyToUse": true, "creationTime": "2026-11-01T10:00:01Z"})
	k.settle()
	v := source.NewSnapshot()
	controllertest.Get(t, k, "default", "vmsnap-monday", v)
	require.NoError(t, k.Delete(t.Context(), v))
	k.settle()
	k.require(false, false, true, "SourceMissing", "was deleted")
	require.False(t, controllertest.There(t, k, "default", "vmsnap-monday", v))
}

// TestKeptDiskStays: a snapshot goes after the disks that begin from it have their volumes.
func TestKeptDiskStays(t *testing.T) {
	k := newKept(t, new(controllertest.Calls))
	k.settle()
	clone := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
		Name: "clone", UID: "clone"}}
	clone.Spec.Source = &v1alpha1.DiskSource{Snapshot: "monday"}
	require.NoError(t, k.Create(t.Context(), clone))
	require.NoError(t, k.Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "vmid-clone",
			OwnerReferences: objects.Owned("VMIdentity", clone)}}))
	require.NoError(t, k.Delete(t.Context(), k.snapshot()))
	require.Positive(t, k.settle().RequeueAfter)
	k.require(false, true, false, "Deleting", "when VMIdentity clone")
	require.NoError(t, k.Delete(t.Context(), clone))
	k.settle()
	require.False(t, controllertest.There(t, k, "default", "monday",
		&v1alpha1.VMIdentitySnapshot{}))
}

// TestRightsGoFirst: the Role in a namespace that is being deleted goes before its snapshots. They
// do not hold up the namespace.
func TestRightsGoFirst(t *testing.T) {
	k := newKept(t, new(controllertest.Calls))
	k.settle()
	role := controllertest.RoleOf(t, controllertest.Settings{Namespaces: []string{"default"}}).
		Without()
	k.r.Client, k.r.Live = role.Cache(k.calls.Client(k)), role.Live(k)
	require.NoError(t, k.Delete(t.Context(), k.snapshot()))
	k.settle()
	require.False(t, controllertest.There(t, k, "default", "monday",
		&v1alpha1.VMIdentitySnapshot{}))
}

// TestSnapshotOfTheSameName: the VolumeSnapshot of an earlier VMIdentitySnapshot, which Kubernetes
// collects, is waited for. It is no failure, and nobody has to delete it.
func TestSnapshotOfTheSameName(t *testing.T) {
	k := newKept(t, new(controllertest.Calls))
	former := k.snapshot()
	former.UID = "former"
	v := newVolumeSnapshot(metav1.ObjectMeta{Namespace: "default", Name: "vmsnap-monday",
		OwnerReferences: objects.Owned("VMIdentitySnapshot", former)}, "vmid-vm1", "fast")
	require.NoError(t, k.Create(t.Context(), v))
	require.Positive(t, k.settle().RequeueAfter)
	k.require(false, true, false, "Taking", "is being deleted: then this one is made")
	require.NoError(t, k.Delete(t.Context(), v))
	k.settle()
	k.require(false, true, false, "Taking", "is being taken")
}

// TestRestoredWithoutOwner: what a backup has restored without its owner is used by nobody, and
// does not go by itself. Nor does a Job that somebody has made.
func TestRestoredWithoutOwner(t *testing.T) {
	for kind, o := range map[string]client.Object{"claim": &corev1.PersistentVolumeClaim{},
		"VolumeSnapshot": source.NewSnapshot()} {
		w := newWorld(t, new(controllertest.Calls), "vm")
		o.SetNamespace(golden().Namespace)
		o.SetName(golden().Name)
		o.SetLabels(map[string]string{labelGolden: golden().Name, v1alpha1.LabelIdentity: ""})
		o.SetFinalizers([]string{"example.com/slow"})
		require.NoError(t, w.Create(t.Context(), o))
		w.converge("vm")
		require.Equal(t, "there is a "+kind+" "+golden().Name+" that no Job was made for: delete "+
			"it", w.populated("vm").Message)
		require.NoError(t, w.Delete(t.Context(), o))
		w.converge("vm")
		require.Contains(t, w.populated("vm").Message, "is being deleted")
		require.True(t, w.there(o))
		o.SetFinalizers(nil)
		require.NoError(t, w.Update(t.Context(), o))
		w.converge("vm")
		require.Equal(t, metav1.ConditionTrue, w.populated("vm").Status)
	}
	w := newWorld(t, new(controllertest.Calls), "vm")
	require.NoError(t, w.Create(t.Context(), &batchv1.Job{ObjectMeta: metav1.ObjectMeta{
		Namespace: golden().Namespace, Name: golden().Name,
		Labels: map[string]string{v1alpha1.LabelIdentity: ""}}}))
	require.NotZero(t, w.converge("vm").RequeueAfter, "nobody tells that it has gone")
	require.Contains(t, w.populated("vm").Message, "was not made for an image: delete it")
}

// TestClaimGoesWithThePod: somebody deletes the claim when the pod has written the image, and the
// Job has not noticed it. The next claim, which is empty, is not taken for that one.
func TestClaimGoesWithThePod(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), "vm")
	w.held = true
	w.converge("vm")
	job, claim := &batchv1.Job{}, &corev1.PersistentVolumeClaim{}
	require.True(t, w.there(job))
	require.True(t, w.there(claim))
	require.NoError(t, w.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: job.Namespace, Name: "pod", Labels: map[string]string{labelGolden: job.Name},
		OwnerReferences: []metav1.OwnerReference{ofJob(job)}},
		Status: corev1.PodStatus{Phase: corev1.PodSucceeded}}))
	require.NoError(t, w.Delete(t.Context(), claim))
	w.held = false
	filled := job.UID
	w.converge("vm")
	require.Equal(t, metav1.ConditionTrue, w.populated("vm").Status)
	require.True(t, w.there(job))
	require.NotEqual(t, filled, job.UID, "the image was written again")
}

// TestWhoHasItsDiskIsLeftAlone: there is nothing to do for an identity whose claim has its volume,
// as one that a backup has restored, or has lost it; nor for one with an unknown usage type.
func TestWhoHasItsDiskIsLeftAlone(t *testing.T) {
	for _, change := range []func(w *world, id *v1alpha1.VMIdentity){
		func(_ *world, id *v1alpha1.VMIdentity) { id.Spec.Population = v1alpha1.Overlay },
		func(_ *world, id *v1alpha1.VMIdentity) { id.Spec.UsageType = "slow" },
		func(w *world, _ *v1alpha1.VMIdentity) { w.claim("vm1", corev1.ClaimBound) },
		func(w *world, _ *v1alpha1.VMIdentity) { w.claim("vm1", corev1.ClaimLost) },
		func(_ *world, id *v1alpha1.VMIdentity) { id.Status.CreationTime = new(metav1.Now()) },
	} {
		w := newWorld(t, new(controllertest.Calls), "vm1")
		id := w.identity("vm1")
		change(w, id)
		status := id.Status
		require.NoError(t, w.Update(t.Context(), id))
		id.Status = status
		require.NoError(t, w.Status().Update(t.Context(), id))
		w.converge("vm1")
		require.Zero(t, w.calls.Writes)
	}
	// Its claim comes back while the image cannot be fetched: the condition says nothing of that.
	w := newWorld(t, new(controllertest.Calls), "vm1")
	w.jobFails = "401 Unauthorized"
	w.converge("vm1")
	require.Equal(t, v1alpha1.ReasonPopulationError, w.populated("vm1").Reason)
	w.claim("vm1", corev1.ClaimBound)
	w.converge("vm1")
	require.Empty(t, w.identity("vm1").Status.Conditions)
}
