package local

import (
	"context"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Reconciler moves disks. Live also reads volumes and nodes, which are in no cache.
type Reconciler struct{ objects.Kit }

// pollInterval is the time between two checks of volumes and nodes, whose changes no event
// announces. After a failure the wait is longer, so that people can inspect it.
const (
	pollInterval = 5 * time.Second
	afterFailed  = 30 * time.Second
)

// state is the content of condition Moving, and the next step.
type state struct {
	moving          bool
	reason, message string
	requeueAfter    time.Duration // 0: an event announces the next step
}

func moving(reason, format string, args ...any) *state {
	return &state{moving: true, reason: reason, message: fmt.Sprintf(format, args...)}
}

func stays(reason, format string, args ...any) *state {
	return &state{reason: reason, message: fmt.Sprintf(format, args...)}
}

func (s *state) after(d time.Duration) *state {
	s.requeueAfter = d
	return s
}

// Reconcile does the next step of a move of one identity, if there is one.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before := &v1alpha1.VMIdentity{}
	if err := r.Get(ctx, req.NamespacedName, before); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if before.Spec.Type != v1alpha1.Local {
		return ctrl.Result{}, nil
	}
	if before.DeletionTimestamp != nil {
		return r.abandon(ctx, before)
	}
	id := before.DeepCopy()
	s, err := r.step(ctx, id)
	if id.ResourceVersion != before.ResourceVersion {
		// The status records the new object. Its change triggers another reconcile.
		return ctrl.Result{RequeueAfter: pollInterval}, err
	}
	if reason, message := objects.Refused(err, "a step of that"); reason != "" &&
		before.Status.Move != nil {
		// A policy of the cluster may keep volumes, claims or Jobs as they are.
		id, err = before.DeepCopy(), nil
		s = moving(v1alpha1.ReasonFailed, "the disk is to be moved, and %s", message).
			after(afterFailed)
	}
	if err != nil || s == nil {
		return ctrl.Result{}, err
	}
	if id.Status.Move != nil && !controllerutil.ContainsFinalizer(id, v1alpha1.FinalizerMove) {
		// Add the finalizer before anything is made: the status is then written with the version
		// that has the finalizer.
		return ctrl.Result{}, r.SetFinalizer(ctx, before, v1alpha1.FinalizerMove, true)
	}
	status := metav1.ConditionFalse
	if s.moving {
		status = metav1.ConditionTrue
	}
	objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
		Type: v1alpha1.ConditionMoving, Status: status, Reason: s.reason, Message: s.message})
	if id.Status.Move != nil {
		id.Status.Ready = false
		objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: s.reason,
			Message: s.message})
	}
	return ctrl.Result{RequeueAfter: s.requeueAfter}, r.Report(ctx, before, id)
}

// off reports whether moves are turned off. Then none begins, and one that has begun is given up.
func (r *Reconciler) off() bool { return r.Options.MoveImage == "" }

// step takes the next step, and returns the state of the move; nil: there is nothing to report.
func (r *Reconciler) step(ctx context.Context, id *v1alpha1.VMIdentity) (*state, error) {
	pods, err := objects.PodsOf(ctx, r.Client, id)
	if err != nil {
		return nil, err
	}
	gated := waiting(pods, id.Name)
	move := id.Status.Move
	switch {
	case move == nil:
		return r.begin(ctx, id, gated)
	case r.off() && move.Step == v1alpha1.Point:
		return moving(v1alpha1.ReasonInvalid, "moves are turned off, and this one has to end: "+
			"turn them on until it has (localDisks.move of the chart). The volumes %s and %s "+
			"have the disk", move.VolumeName, move.NewVolumeName), nil
	case move.Step == v1alpha1.Point:
		return r.point(ctx, id)
	case r.off(), wish(id, gated) != move.To:
		return r.giveUp(ctx, id)
	}
	return r.copy(ctx, id)
}

// begin records a move in the status, if the disk should move.
func (r *Reconciler) begin(ctx context.Context, id *v1alpha1.VMIdentity,
	gated []objects.Asking) (*state, error) {
	if controllerutil.ContainsFinalizer(id, v1alpha1.FinalizerMove) {
		if gone, err := r.clean(ctx, id); !gone || err != nil {
			return stays(v1alpha1.ReasonStays, "what moved the disk is ending").
				after(pollInterval), err
		}
	}
	to, err := "", error(nil)
	if !r.off() {
		to, err = target(ctx, r.Live, id, gated)
	}
	switch {
	case err != nil:
		return nil, err
	case to == "" && controllerutil.ContainsFinalizer(id, v1alpha1.FinalizerMove):
		return nil, r.SetFinalizer(ctx, id, v1alpha1.FinalizerMove, false)
	case to == "":
		return r.noLongerWanted(id), nil
	case id.Status.UsedBy != nil:
		return stays(v1alpha1.ReasonInUse, "pod %s uses the disk: it is moved to node %s when the "+
			"pod has ended", id.Status.UsedBy.Name, to), nil
	}
	node, err := findNode(ctx, r.Live, to)
	if err != nil {
		return nil, err
	}
	if node == nil {
		return stays(v1alpha1.ReasonInvalid, "the disk is to be moved to node %s, and there is no "+
			"such node: correct the annotation %s, or the pod's node selector", to,
			v1alpha1.AnnotationMoveTo).after(afterFailed), nil
	}
	if e := id.Status.Export; e != nil && e.Running {
		return stays(v1alpha1.ReasonExporting, "Job %s commits the disk to %s: it is moved to "+
			"node %s after that", e.JobName, e.Reference, to).after(pollInterval), nil
	}
	// A pod whose gate was removed by hand uses the disk, too. The cache may not have it.
	if user, err := r.user(ctx, id); user != "" || err != nil {
		return stays(v1alpha1.ReasonInUse, "pod %s uses the disk: it is moved to node %s when the "+
			"pod has ended", user, to).after(pollInterval), err
	}
	claim, err := objects.Claim(ctx, r.Live, id)
	if err != nil {
		return nil, err
	}
	if claim == nil || !metav1.IsControlledBy(claim, id) || claim.DeletionTimestamp != nil ||
		claim.Status.Phase != corev1.ClaimBound || id.Status.CreationTime == nil ||
		len(claim.Spec.AccessModes) == 0 {
		return nil, nil // package identity reports the problem
	}
	volume, err := objects.Volume(ctx, r.Live, claim.Spec.VolumeName, "")
	if err != nil {
		return nil, err
	}
	if !objects.BoundTo(volume, claim.UID) {
		return stays(v1alpha1.ReasonClaimForeign, "the volume %s is not bound to the claim %s, so "+
			"it is not moved", claim.Spec.VolumeName, claim.Name).after(afterFailed), nil
	}
	// The pods that move the disk need the secret, like machines.
	if _, err := identity.MakeSecret(ctx, r.Client, id); err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	id.Status.Move = &v1alpha1.MoveStatus{To: to, From: id.Status.NodeName, Step: v1alpha1.Copy,
		ClaimUID: claim.UID, VolumeName: volume.Name, VolumeUID: volume.UID,
		AccessMode: claim.Spec.AccessModes[0],
		Size:       claim.Spec.Resources.Requests[corev1.ResourceStorage]}
	return moving(v1alpha1.ReasonCopying, "the disk is moved to node %s", to).
		after(pollInterval), nil
}

// noLongerWanted withdraws the report about a move that is no longer wanted.
func (r *Reconciler) noLongerWanted(id *v1alpha1.VMIdentity) *state {
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionMoving)
	if c == nil || c.Reason == v1alpha1.ReasonMoved || c.Reason == v1alpha1.ReasonStays {
		return nil
	}
	return stays(v1alpha1.ReasonStays, "nobody asks for the disk elsewhere")
}

// user returns a pod that may use the disk, according to the API server, or "". Pods that move the
// disk do not count.
func (r *Reconciler) user(ctx context.Context, id *v1alpha1.VMIdentity) (string, error) {
	pods, err := objects.PodsWith(ctx, r.Live, id)
	return objects.User(slices.DeleteFunc(pods, func(p corev1.Pod) bool {
		return p.Labels[labelMove] != ""
	}), id), err
}

// giveUp ends a move that is not needed any more.
func (r *Reconciler) giveUp(ctx context.Context, id *v1alpha1.VMIdentity) (*state, error) {
	gone, err := r.clean(ctx, id)
	if err != nil {
		return nil, err
	}
	if !gone {
		return moving(v1alpha1.ReasonStays, "the disk stays where it is: what was to move it is "+
			"ending").after(pollInterval), nil
	}
	id.Status.Move = nil
	return stays(v1alpha1.ReasonStays, "nobody asks for the disk elsewhere"), nil
}

// abandon ends a move of an identity that is being deleted.
func (r *Reconciler) abandon(ctx context.Context, before *v1alpha1.VMIdentity) (ctrl.Result,
	error) {
	if !controllerutil.ContainsFinalizer(before, v1alpha1.FinalizerMove) {
		return ctrl.Result{}, nil
	}
	if gone, err := r.clean(ctx, before); !gone || err != nil {
		return ctrl.Result{RequeueAfter: pollInterval}, err
	}
	if m := before.Status.Move; m != nil && m.Step == v1alpha1.Point {
		// It is unknown whether the data is still wanted: `--cascade=orphan` means that.
		r.Events.Eventf(before, nil, corev1.EventTypeWarning, v1alpha1.ReasonDeleting, "Reconcile",
			"deleted while its disk was moved: the volumes %s and %s both have the data and may "+
				"stay; delete them if nobody needs it", m.VolumeName, m.NewVolumeName)
	}
	return ctrl.Result{}, r.SetFinalizer(ctx, before, v1alpha1.FinalizerMove, false)
}

// Setup adds the controller to a manager, even if moves are turned off, because one may have begun
// earlier.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{Kit: kit}
	b := r.For(mgr, "local", &v1alpha1.VMIdentity{})
	if r.off() {
		return b.Complete(objects.Reconciler(r))
	}
	return b.Owns(&corev1.PersistentVolumeClaim{}).
		Owns(&batchv1.Job{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(objects.Identities)).
		Complete(objects.Reconciler(r))
}
