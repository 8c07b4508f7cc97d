package local_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/local"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// moved checks the end of a move to node-2.
func (w *world) moved(former string) {
	w.t.Helper()
	id := w.identity()
	require.Nil(w.t, id.Status.Move)
	require.True(w.t, id.Status.Ready)
	require.Equal(w.t, "node-2", id.Status.NodeName)
	require.Equal(w.t, "False Moved: the disk was moved from node-1 to node-2",
		w.condition(v1alpha1.ConditionMoving))
	require.NotContains(w.t, id.Finalizers, v1alpha1.FinalizerMove)
	claim := w.claim()
	require.NotEqual(w.t, former, claim.Spec.VolumeName)
	require.Equal(w.t, []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
		claim.Spec.AccessModes)
	require.Equal(w.t, "Overlay "+image, claim.Annotations[v1alpha1.AnnotationContent])
	v := &corev1.PersistentVolume{}
	require.True(w.t, w.get(claim.Spec.VolumeName, v))
	require.Equal(w.t, corev1.PersistentVolumeReclaimDelete, v.Spec.PersistentVolumeReclaimPolicy)
	require.Empty(w.t, v.Annotations)
	require.False(w.t, w.get(former, v), "the former volume goes last")
	require.False(w.t, w.get("vmmove-vm", &corev1.PersistentVolumeClaim{}))
	require.False(w.t, w.get("vmrecv-vm", &corev1.Pod{}))
}

// stopped is a world whose machine has ended on node-1, and the volume of its disk.
func stopped(t *testing.T) (w *world, volume string) {
	t.Helper()
	w = newWorld(t, &controllertest.Calls{})
	w.remove(&corev1.Pod{}, "vm")
	return w, w.claim().Spec.VolumeName
}

// TestPodOnAnotherNode: the disk follows the pod, whichever write fails.
func TestPodOnAnotherNode(t *testing.T) {
	controllertest.EachWriteFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls)
		former := w.claim().Spec.VolumeName
		w.remove(&corev1.Pod{}, "vm")
		w.pod("vm", "node-2")
		w.converge()
		require.False(t, gated(w.getPod("vm")))
		w.moved(former)
		writes := calls.Writes + w.others.Writes
		w.converge()
		require.Equal(t, writes, calls.Writes+w.others.Writes,
			"nothing is written while nothing changes")
	})
}

// rescue is a pod that has the claim and does not ask for the disk.
func rescue() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "rescue"}, Spec: corev1.PodSpec{
		Volumes: []corev1.Volume{{VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
				ClaimName: "vmid-vm"}}}}}}
}

// TestAnnotation: the disk goes where a person says, once its pod has ended, and one that has the
// claim without asking for the disk.
func TestAnnotation(t *testing.T) {
	w := newWorld(t, &controllertest.Calls{})
	former := w.claim().Spec.VolumeName
	w.annotate("node-3")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "False InUse: pod vm uses the disk")
	w.create(rescue())
	w.remove(&corev1.Pod{}, "vm")
	w.annotate("node-2")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "pod rescue uses the disk")
	w.remove(&corev1.Pod{}, "rescue")
	w.annotate("node-3")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving),
		"False Invalid: the disk is to be moved to node node-3, and there is no such node")
	w.annotate("node-2")
	w.converge()
	w.moved(former)
	w.pod("vm", "node-1")
	w.converge()
	require.True(t, gated(w.getPod("vm")))
	require.Contains(t, w.condition(v1alpha1.ConditionInUse), "it has to run on node node-1, and "+
		"the annotation disk.kubevirt.io/move-to of VMIdentity vm keeps the disk on node-2")
}

// TestSourceGone: nothing is deleted, and the move goes on when the node is back. If a pod asks for
// the disk on its old node, it gets it.
func TestSourceGone(t *testing.T) {
	for _, back := range []bool{true, false} {
		w, former := stopped(t)
		node := &corev1.Node{}
		require.NoError(t, w.Get(t.Context(), client.ObjectKey{Name: "node-1"}, node))
		require.NoError(t, w.Delete(t.Context(), node))
		w.pod("vm", "node-2")
		w.converge()
		require.Contains(t, w.condition(v1alpha1.ConditionMoving), "True SourceGone: ")
		require.Contains(t, w.condition(v1alpha1.ConditionMoving), "volume node affinity conflict")
		require.Contains(t, w.condition(v1alpha1.ConditionReady), "False SourceGone: ")
		require.Equal(t, former, w.claim().Spec.VolumeName)
		require.Contains(t, w.told(), "Warning SourceGone")
		node.ResourceVersion = ""
		require.NoError(t, w.Create(t.Context(), node))
		if !back {
			w.remove(&corev1.Pod{}, "vm")
			w.pod("vm", "")
		}
		w.converge()
		require.False(t, gated(w.getPod("vm")))
		if back {
			w.moved(former)
			continue
		}
		require.Equal(t, former, w.claim().Spec.VolumeName)
		require.Contains(t, w.condition(v1alpha1.ConditionMoving), "False Stays: ")
		require.Nil(t, w.identity().Status.Move)
	}
}

// TestTargetWithoutRoom: the status says that there is no room, and the move goes on when there is.
func TestTargetWithoutRoom(t *testing.T) {
	w, former := stopped(t)
	w.full = true
	w.pod("vm", "node-2")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "True TargetFailed: node node-2 "+
		"cannot take the disk: 0/2 nodes are available")
	require.True(t, gated(w.getPod("vm")))
	require.Contains(t, w.told(), "Warning TargetFailed")
	w.full = false
	w.converge()
	w.moved(former)
}

// TestDeletedWhileItMoves: if the identity is deleted, so is everything that moves its disk,
// whichever write fails.
func TestDeletedWhileItMoves(t *testing.T) {
	controllertest.EachWriteFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls)
		w.remove(&corev1.Pod{}, "vm")
		w.full = true
		w.annotate("node-2")
		w.converge()
		require.NotNil(t, w.identity().Status.Move)
		w.whole = nil // the volumes may be removed now
		w.remove(&v1alpha1.VMIdentity{}, "vm")
		w.converge()
		id := &v1alpha1.VMIdentity{}
		require.True(t, apierrors.IsNotFound(w.Get(t.Context(),
			client.ObjectKey{Namespace: namespace, Name: "vm"}, id)), "%v", id.Finalizers)
		var claims corev1.PersistentVolumeClaimList
		require.NoError(t, w.List(t.Context(), &claims))
		require.Empty(t, claims.Items)
		require.False(t, w.get("vmsend-vm", &corev1.Pod{}))
	})
}

// TestTurnedOff: if moves are turned off while a disk is copied, it stays where it was, and nothing
// of the move is left.
func TestTurnedOff(t *testing.T) {
	w, former := stopped(t)
	w.full = true
	w.annotate("node-2")
	w.converge()
	require.Contains(t, w.identity().Finalizers, v1alpha1.FinalizerMove)
	w.off = true
	// Without moves and all else that uses Jobs, a person deletes those.
	w.remove(&batchv1.Job{}, "vmsend-vm")
	w.remove(&batchv1.Job{}, "vmrecv-vm")
	w.converge()
	id := w.identity()
	require.Nil(t, id.Status.Move)
	require.True(t, id.Status.Ready)
	require.NotContains(t, id.Finalizers, v1alpha1.FinalizerMove)
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "False Stays: ")
	require.False(t, w.get("vmmove-vm", &corev1.PersistentVolumeClaim{}))
	require.Equal(t, former, w.claim().Spec.VolumeName)
}

// TestTurnedOffAtTheEnd: while the claims change, a move can only go on, or end with its identity.
func TestTurnedOffAtTheEnd(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		w, former := stopped(t)
		w.offAt = v1alpha1.Point
		w.annotate("node-2")
		w.converge()
		require.Contains(t, w.condition(v1alpha1.ConditionMoving),
			"True Invalid: moves are turned off")
		require.Contains(t, w.condition(v1alpha1.ConditionReady), "False Invalid: moves are turned")
		require.Contains(t, w.told(), "Warning Invalid")
		if !deleted {
			w.off, w.offAt = false, ""
			w.converge()
			w.moved(former)
			continue
		}
		w.offAt, w.whole = "", nil // the volumes may be removed now
		w.remove(&v1alpha1.VMIdentity{}, "vm")
		for _, name := range []string{"vmsend-vm", "vmrecv-vm"} {
			if job := new(batchv1.Job); w.get(name, job) {
				w.remove(job, name)
			}
		}
		w.converge()
		require.False(t, w.get("vm", &v1alpha1.VMIdentity{}))
		require.False(t, w.get("vmmove-vm", &corev1.PersistentVolumeClaim{}))
	}
}

// TestClaimGoesWhileItIsFilled: somebody deletes the claim under the receiver. The next claim of
// its name, which is empty, is not taken for the one that was filled.
func TestClaimGoesWhileItIsFilled(t *testing.T) {
	w, former := stopped(t)
	w.stolen = true
	w.annotate("node-2")
	w.converge()
	w.moved(former)
}

// TestStepThatIsRefused: where a policy of the cluster keeps volumes as they are, the conditions
// say so. When it lets them change, the move goes on.
func TestStepThatIsRefused(t *testing.T) {
	w, former := stopped(t)
	w.offAt = v1alpha1.Point
	w.annotate("node-2")
	w.converge()
	w.off, w.offAt = false, ""
	r := &local.Reconciler{Kit: objects.Kit{Live: w, Client: interceptor.NewClient(w.WithWatch,
		interceptor.Funcs{Patch: func(_ context.Context, _ client.WithWatch, o client.Object,
			_ client.Patch, _ ...client.PatchOption) error {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "persistentvolumes"},
				o.GetName(), errors.New("volumes are kept"))
		}}), Events: &events.FakeRecorder{Events: w.events},
		Options: objects.Options{MoveImage: "kubevirt.io:disk-controller"}}}
	require.NoError(t, testtool.Err(r.Reconcile(t.Context(), ctrl.Request{
		NamespacedName: types.NamespacedName{Namespace: namespace, Name: "vm"}})))
	for _, kind := range []string{v1alpha1.ConditionMoving, v1alpha1.ConditionReady} {
		require.Contains(t, w.condition(kind), "Failed: the disk is to be moved, and the API "+
			"server does not allow a step of that: volume ")
		require.Contains(t, w.condition(kind), "volumes are kept")
	}
	w.converge()
	w.moved(former)
}

// TestNewVolumeGone: if the volume with the moved disk goes before the claim has it, and the move
// is given up, the former volume goes with its claim again.
func TestNewVolumeGone(t *testing.T) {
	w, former := stopped(t)
	w.offAt = v1alpha1.Point
	w.annotate("node-2")
	w.converge()
	w.off, w.offAt, w.whole = false, "", nil
	w.create(rescue())
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving),
		"pod rescue uses the disk, although it is being moved")
	w.remove(&corev1.PersistentVolume{}, w.identity().Status.Move.NewVolumeName)
	w.annotate("")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "False Stays: ")
	v := &corev1.PersistentVolume{}
	require.True(t, w.get(former, v))
	require.Equal(t, corev1.PersistentVolumeReclaimDelete, v.Spec.PersistentVolumeReclaimPolicy)
	require.Empty(t, v.Annotations)
}

// TestNewVolumeGoneAfterTheClaim: if the volume with the moved disk goes when the claim has gone,
// the claim is made again with the former volume.
func TestNewVolumeGoneAfterTheClaim(t *testing.T) {
	w, former := stopped(t)
	w.whole = nil
	v, claim, id := &corev1.PersistentVolume{}, w.claim(), w.identity()
	require.True(t, w.get(former, v))
	v.Annotations = map[string]string{v1alpha1.Group + "/reclaim-policy": "Delete"}
	v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	require.NoError(t, w.Update(t.Context(), v))
	id.Status.Move = &v1alpha1.MoveStatus{To: "node-2", From: "node-1", Step: v1alpha1.Point,
		ClaimUID: claim.UID, VolumeName: former, AccessMode: claim.Spec.AccessModes[0],
		Size: claim.Spec.Resources.Requests[corev1.ResourceStorage], NewVolumeName: "gone"}
	require.NoError(t, w.Status().Update(t.Context(), id))
	claim.Finalizers = nil
	require.NoError(t, w.Update(t.Context(), claim))
	w.remove(claim, claim.Name)
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "False Stays: ")
	id = w.identity()
	require.Nil(t, id.Status.Move)
	require.True(t, id.Status.Ready)
	require.Equal(t, "node-1", id.Status.NodeName)
	require.Equal(t, former, w.claim().Spec.VolumeName)
	require.True(t, w.get(former, v))
	require.Equal(t, corev1.PersistentVolumeReclaimDelete, v.Spec.PersistentVolumeReclaimPolicy)
}

// foreign makes a volume that belongs to a claim in another namespace.
func (w *world) foreign() *corev1.PersistentVolume {
	w.t.Helper()
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "foreign"},
		Spec: corev1.PersistentVolumeSpec{StorageClassName: "local",
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: "other",
				Name: "db", UID: "uid-of-db"}}}
	w.create(v)
	return v
}

// untouched checks that nobody has changed the volume from foreign.
func (w *world) untouched(v *corev1.PersistentVolume) {
	w.t.Helper()
	now := &corev1.PersistentVolume{}
	require.True(w.t, w.get(v.Name, now))
	require.Equal(w.t, v.Spec, now.Spec)
	require.Empty(w.t, now.Annotations)
}

// TestForgedObjects: a user makes a claim and Jobs with the names, labels and owner of those that
// move a disk. The claim names a volume of somebody else, and the Jobs are complete. None of them
// is believed, and the disk is moved by the controller's own.
func TestForgedObjects(t *testing.T) {
	for _, owned := range []bool{true, false} {
		w := newWorld(t, &controllertest.Calls{})
		former, victim := w.claim().Spec.VolumeName, w.foreign()
		w.remove(&corev1.Pod{}, "vm")
		forged := func(name string) metav1.ObjectMeta {
			m := metav1.ObjectMeta{Name: name, Labels: map[string]string{
				v1alpha1.LabelIdentity: "vm", v1alpha1.Group + "/move": "vm"}}
			if owned {
				m.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(w.identity(),
					v1alpha1.GroupVersion.WithKind("VMIdentity"))}
			}
			return m
		}
		w.create(&corev1.PersistentVolumeClaim{ObjectMeta: forged("vmmove-vm"),
			Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: new("local"),
				VolumeName: victim.Name}})
		for _, name := range []string{"vmsend-vm", "vmrecv-vm"} {
			job := &batchv1.Job{ObjectMeta: forged(name)}
			job.Spec.Template.Labels = job.Labels
			job.Spec.Template.Spec.Containers = []corev1.Container{{Name: "x", Image: "x"}}
			w.create(job)
			job.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete,
				Status: corev1.ConditionTrue}}
			require.NoError(t, w.Status().Update(t.Context(), job))
		}
		w.annotate("node-2")
		w.converge()
		w.untouched(victim)
		if !owned {
			require.Contains(t, w.condition(v1alpha1.ConditionMoving),
				"True ClaimForeign: the claim vmmove-vm is not of this move: the move goes on when")
			w.remove(&corev1.PersistentVolumeClaim{}, "vmmove-vm")
			w.converge()
			require.Contains(t, w.condition(v1alpha1.ConditionMoving),
				"Job vmrecv-vm is of an earlier try, or not of this move: the move goes on when")
			w.remove(&batchv1.Job{}, "vmsend-vm")
			w.remove(&batchv1.Job{}, "vmrecv-vm")
			w.kubernetes() // their pods go
			w.converge()
		}
		w.moved(former)
		w.untouched(victim)
	}
}

// TestVolumeOfSomebodyElse: whatever the status says, a volume that belongs to another claim is not
// taken from it.
func TestVolumeOfSomebodyElse(t *testing.T) {
	w := newWorld(t, &controllertest.Calls{})
	victim, claim := w.foreign(), w.claim()
	w.remove(&corev1.Pod{}, "vm")
	id := w.identity()
	id.Status.Move = &v1alpha1.MoveStatus{To: "node-2", Step: v1alpha1.Point, ClaimUID: claim.UID,
		VolumeName: claim.Spec.VolumeName, AccessMode: corev1.ReadWriteOnce,
		NewVolumeName: victim.Name}
	require.NoError(t, w.Status().Update(t.Context(), id))
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving), "True ClaimForeign: the volume "+
		"foreign with the moved disk belongs to the claim db in namespace other")
	w.untouched(victim)
	require.Equal(t, claim.UID, w.claim().UID, "the claim of the disk stays")
}

// TestClaimOfAnotherVolume: the claim of the identity names a volume that is not bound to it. It is
// neither copied nor changed.
func TestClaimOfAnotherVolume(t *testing.T) {
	w := newWorld(t, &controllertest.Calls{})
	victim := w.foreign()
	w.remove(&corev1.Pod{}, "vm")
	claim := w.claim()
	claim.Spec.VolumeName = victim.Name
	require.NoError(t, w.Update(t.Context(), claim))
	w.whole = nil
	w.annotate("node-2")
	w.converge()
	require.Contains(t, w.condition(v1alpha1.ConditionMoving),
		"False ClaimForeign: the volume foreign is not bound to the claim vmid-vm")
	w.untouched(victim)
}

// told returns the events so far.
func (w *world) told() string {
	var all []string
	for {
		select {
		case e := <-w.events:
			all = append(all, e)
		default:
			return strings.Join(all, "\n")
		}
	}
}

// TestCacheIsLate: a claim that was just made stays while the cache does not have the status that
// says so. The newer version comes as an event, and the move goes on.
func TestCacheIsLate(t *testing.T) {
	w, former := stopped(t)
	w.annotate("node-2")
	id := w.identity()
	id.Status.UsedBy = nil
	require.NoError(t, w.Status().Update(t.Context(), id))

	r := &local.Reconciler{Kit: objects.Kit{Client: w, Live: w,
		Events:  &events.FakeRecorder{Events: w.events},
		Options: objects.Options{MoveImage: "kubevirt.io:disk-controller"}}}
	reconcile := func() {
		t.Helper()
		require.NoError(t, testtool.Err(objects.Reconciler(r).Reconcile(t.Context(), ctrl.Request{
			NamespacedName: types.NamespacedName{Namespace: namespace, Name: "vm"}})))
	}
	made := &corev1.PersistentVolumeClaim{}
	for range 10 {
		before := w.identity()
		if reconcile(); w.get("vmmove-vm", made) {
			r.Client = controllertest.Late(w.WithWatch, before)
			break
		}
	}
	require.NotEmpty(t, made.UID)
	reconcile()
	has := &corev1.PersistentVolumeClaim{}
	require.True(t, w.get("vmmove-vm", has), "it was just made")
	require.Equal(t, made.UID, has.UID)
	require.Nil(t, has.DeletionTimestamp)
	w.converge()
	w.moved(former)
}
