package snapshot

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Disks takes VMIdentitySnapshots: it makes a VolumeSnapshot of the identity's claim, and reports
// the state from the driver.
type Disks struct{ objects.Kit }

// outcome is the content of the three conditions. A failure may be temporary; progress ends by
// itself.
type outcome struct {
	reason, message string
	ready, failed   bool
	requeueAfter    time.Duration // 0: an event announces the next step
}

func taking(format string, args ...any) outcome {
	return outcome{reason: v1alpha1.ReasonTaking, message: fmt.Sprintf(format, args...)}
}

func failing(reason, format string, args ...any) outcome {
	return outcome{reason: reason, message: fmt.Sprintf(format, args...), failed: true}
}

const kindSnapshot = "VMIdentitySnapshot"

// pollInterval is the time between two checks of state that no event announces.
const pollInterval = 10 * time.Second

// Reconcile takes one snapshot, or lets it go.
func (r *Disks) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before, err := objects.Find[v1alpha1.VMIdentitySnapshot](ctx, r.Client, "VMIdentitySnapshot",
		req.NamespacedName)
	if before == nil || err != nil {
		return ctrl.Result{}, err
	}
	if before.DeletionTimestamp != nil {
		return r.remove(ctx, before)
	}
	if !controllerutil.ContainsFinalizer(before, v1alpha1.FinalizerSnapshot) {
		return ctrl.Result{}, r.SetFinalizer(ctx, before, v1alpha1.FinalizerSnapshot, true)
	}
	s := before.DeepCopy()
	o, err := r.take(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: o.requeueAfter}, r.say(ctx, before, s, o)
}

// say writes the status, and an event about a new failure.
func (r *Disks) say(ctx context.Context, before, s *v1alpha1.VMIdentitySnapshot, o outcome) error {
	s.Status.ReadyToUse, s.Status.ObservedGeneration = o.ready, s.Generation
	is := func(t bool) metav1.ConditionStatus {
		if t {
			return metav1.ConditionTrue
		}
		return metav1.ConditionFalse
	}
	for name, status := range map[string]bool{v1alpha1.ConditionReady: o.ready,
		v1alpha1.ConditionProgressing: !o.ready && !o.failed, v1alpha1.ConditionFailure: o.failed} {
		c := metav1.Condition{Type: name, Status: is(status), Reason: o.reason, Message: o.message}
		objects.SetCondition(&s.Status.Conditions, s.Generation, c)
	}
	return r.ReportAs(ctx, before, s, func(string) string {
		if o.failed {
			return corev1.EventTypeWarning
		}
		return ""
	})
}

// take makes the VolumeSnapshot if it was never made, and notes its state in the status.
func (r *Disks) take(ctx context.Context, s *v1alpha1.VMIdentitySnapshot) (outcome, error) {
	if r.Snapshots == nil {
		return failing(v1alpha1.ReasonInvalid, "the controller has no VolumeSnapshots: install "+
			"their CRDs and a CSI driver with snapshots, and restart the controller"), nil
	}
	name := v1alpha1.VolumeSnapshotName(s.Name)
	volume := source.NewSnapshot()
	err := r.Snapshots.Get(ctx, client.ObjectKey{Namespace: s.Namespace, Name: name}, volume)
	owner := metav1.GetControllerOf(volume)
	switch {
	case err == nil && owner != nil && owner.UID != s.UID && owner.Kind == kindSnapshot &&
		owner.Name == s.Name:
		o := taking("the VolumeSnapshot %s of an earlier VMIdentitySnapshot of this name is being "+
			"deleted: then this one is made", name)
		o.requeueAfter = pollInterval
		return o, nil
	case err == nil && !metav1.IsControlledBy(volume, s):
		o := failing(v1alpha1.ReasonInvalid, "there is a VolumeSnapshot %s that is not of this "+
			"VMIdentitySnapshot: delete it, or make one of another name", name)
		o.requeueAfter = pollInterval
		return o, nil
	case err == nil:
		return r.taken(s, volume), nil
	case !apierrors.IsNotFound(err):
		return outcome{}, fmt.Errorf("VolumeSnapshot %s: %w", name, err)
	case s.Status.CreationTime != nil:
		return failing(v1alpha1.ReasonSourceMissing, "VolumeSnapshot %s was deleted, and the data "+
			"with it: delete this VMIdentitySnapshot", name), nil
	}
	return r.begin(ctx, s, name)
}

// begin makes the VolumeSnapshot. First it records the properties of the disk: later, its identity
// may be gone, or another one with its name may have another disk. Then it reads the identity
// again.
func (r *Disks) begin(ctx context.Context, s *v1alpha1.VMIdentitySnapshot, name string) (outcome,
	error) {
	id, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Live, "VMIdentity",
		client.ObjectKey{Namespace: s.Namespace, Name: string(s.Spec.IdentityName)})
	switch {
	case err != nil:
		return outcome{}, err
	case id == nil, id.DeletionTimestamp != nil:
		o := failing(v1alpha1.ReasonIdentityMissing, "there is no VMIdentity %s in the namespace, "+
			"or it is being deleted", s.Spec.IdentityName)
		o.requeueAfter = pollInterval
		return o, nil
	case id.Spec.Type == v1alpha1.Local:
		return failing(v1alpha1.ReasonInvalid, "VMIdentity %s has type Local, and Local disks "+
			"have no snapshots", id.Name), nil
	}
	claim, err := objects.Claim(ctx, r.Live, id)
	if err != nil {
		return outcome{}, err
	}
	if claim == nil || claim.DeletionTimestamp != nil || !metav1.IsControlledBy(claim, id) ||
		claim.Status.Phase != corev1.ClaimBound {
		o := taking("VMIdentity %s has no volume yet: `kubectl describe vmid %s` says why", id.Name,
			id.Name)
		o.requeueAfter = pollInterval
		return o, nil
	}
	disk := &v1alpha1.SnapshotDisk{Image: id.Spec.Image, Population: id.Spec.Population,
		BlockSize: id.Spec.BlockSize, Size: id.Spec.Size}
	if !equality.Semantic.DeepEqual(s.Status.Disk, disk) || s.Status.VolumeSnapshotName != name {
		s.Status.Disk = disk
		s.Status.VolumeSnapshotName = name
		return taking("VolumeSnapshot %s is made", name), nil // the change makes another request
	}
	return r.create(ctx, s, newVolumeSnapshot(metav1.ObjectMeta{Namespace: s.Namespace, Name: name,
		OwnerReferences: objects.Owned(kindSnapshot, s)}, claim.Name,
		r.Options.SnapshotClass))
}

func (r *Disks) create(ctx context.Context, s *v1alpha1.VMIdentitySnapshot,
	volume *unstructured.Unstructured) (outcome, error) {
	err := r.Client.Create(ctx, volume, client.FieldOwner(v1alpha1.FieldManager))
	if err == nil {
		return taking("VolumeSnapshot %s is made", volume.GetName()), nil
	}
	if _, message := objects.Refused(err, "VolumeSnapshot "+volume.GetName()); message != "" {
		o := failing(v1alpha1.ReasonFailed, "%s", message)
		o.requeueAfter = pollInterval
		return o, nil
	}
	return outcome{}, fmt.Errorf("VolumeSnapshot %s of VMIdentitySnapshot %s: %w", volume.GetName(),
		s.Name, err) // even if it exists, and the cache is late
}

// taken notes the state of a VolumeSnapshot.
func (r *Disks) taken(s *v1alpha1.VMIdentitySnapshot, volume *unstructured.Unstructured) outcome {
	ready, size, wrong := source.SnapshotState(volume)
	if !size.IsZero() {
		s.Status.RestoreSize = &size
	}
	if text, ok, _ := unstructured.NestedString(volume.Object, "status", "creationTime"); ok {
		if at, err := time.Parse(time.RFC3339, text); err == nil {
			s.Status.CreationTime = &metav1.Time{Time: at}
		}
	}
	if s.Status.Error = nil; wrong != "" && !ready {
		s.Status.Error = &v1alpha1.SnapshotError{Message: wrong}
		text, _, _ := unstructured.NestedString(volume.Object, "status", "error", "time")
		if at, err := time.Parse(time.RFC3339, text); err == nil {
			s.Status.Error.Time = metav1.Time{Time: at}
		}
	}
	switch name := volume.GetName(); {
	case volume.GetDeletionTimestamp() != nil:
		return failing(v1alpha1.ReasonSourceMissing, "VolumeSnapshot %s is being deleted, and the "+
			"data with it: delete this VMIdentitySnapshot", name)
	case ready:
		return outcome{reason: v1alpha1.ReasonReady, ready: true,
			message: fmt.Sprintf("VolumeSnapshot %s has the disk", name)}
	case wrong != "":
		return failing(v1alpha1.ReasonFailed, "the driver cannot take VolumeSnapshot %s: %s", name,
			wrong)
	default:
		return taking("VolumeSnapshot %s is being taken; if that lasts, `kubectl describe "+
			"volumesnapshot %s` says why", name, name)
	}
}

// remove lets a snapshot go when no disk needs it any more. The garbage collector then deletes the
// VolumeSnapshot.
func (r *Disks) remove(ctx context.Context, before *v1alpha1.VMIdentitySnapshot) (ctrl.Result,
	error) {
	if !controllerutil.ContainsFinalizer(before, v1alpha1.FinalizerSnapshot) {
		return ctrl.Result{}, nil
	}
	clone, err := source.Finder{Kit: r.Kit}.Waiting(ctx, before.Namespace,
		v1alpha1.DiskSource{Snapshot: v1alpha1.SourceName(before.Name)})
	if err != nil {
		return ctrl.Result{}, err
	}
	if clone == "" {
		return ctrl.Result{}, r.SetFinalizer(ctx, before, v1alpha1.FinalizerSnapshot, false)
	}
	return ctrl.Result{RequeueAfter: pollInterval}, r.say(ctx, before, before.DeepCopy(),
		outcome{reason: v1alpha1.ReasonDeleting, message: fmt.Sprintf(
			"the snapshot is deleted when VMIdentity %s, which begins from it, has its volume: "+
				"start a pod with that, or delete it, too", clone)})
}
