package local

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// copy fills another claim on the other node.
func (r *Reconciler) copy(ctx context.Context, id *v1alpha1.VMIdentity) (*state, error) {
	m := id.Status.Move
	have, err := objects.Claim(ctx, r.Live, id)
	if err != nil {
		return nil, err
	}
	if have == nil || have.UID != m.ClaimUID {
		return r.giveUp(ctx, id) // package identity reports the lost disk
	}
	if user, err := r.user(ctx, id); user != "" || err != nil {
		return moving(v1alpha1.ReasonInUse, "pod %s uses the disk, although it is being moved: "+
			"delete the pod", user).after(pollInterval), err
	}
	volume, err := objects.Volume(ctx, r.Live, m.VolumeName, m.VolumeUID)
	if err != nil {
		return nil, err
	}
	if !objects.BoundTo(volume, m.ClaimUID) {
		return r.sourceGone(id, "its volume %s is gone", m.VolumeName), nil
	}
	claim, err := objects.ClaimOf(ctx, r.Live, id.Namespace, moveClaim(id))
	switch {
	case err != nil:
		return nil, err
	case claim == nil:
		return r.create(ctx, id, "claim",
			newClaim(id, moveClaim(id), volume.Spec.StorageClassName, ""))
	case notOfMove(id, claim):
		s := moving(v1alpha1.ReasonClaimForeign, "the claim %s is not of this move: the move "+
			"goes on when it is gone", claim.Name).after(pollInterval)
		if mine, err := r.made(ctx, id, claim); err != nil || !mine {
			return s, err
		}
		return s, objects.DeleteClaim(ctx, r.Client, claim)
	}
	receiver, s, err := r.job(ctx, id, receiveJob(id))
	if s != nil || err != nil {
		return s, err
	}
	if receiver != nil && receiver.Annotations[annotationFilled] != string(claim.UID) {
		return moving(v1alpha1.ReasonCopying, "the claim %s was deleted: the disk is copied again",
			claim.Name).after(pollInterval), r.deleteJob(ctx, receiver)
	}
	if receiver != nil && objects.Ended(receiver).Type == batchv1.JobComplete {
		fresh, err := objects.Volume(ctx, r.Live, claim.Spec.VolumeName, "")
		if err != nil {
			return nil, err
		}
		// The claim may name any volume, but only Kubernetes writes the claim into the volume.
		if claim.Status.Phase != corev1.ClaimBound || !objects.BoundTo(fresh, claim.UID) {
			return moving(v1alpha1.ReasonClaimForeign, "the claim %s was filled, and volume %q is "+
				"not bound to it: delete the claim", claim.Name, claim.Spec.VolumeName).
				after(afterFailed), nil
		}
		m.Step, m.NewVolumeName, m.NewVolumeUID = v1alpha1.Point, fresh.Name, fresh.UID
		return moving(v1alpha1.ReasonPointing, "the disk is on node %s: its claim gets the volume "+
			"%s", m.To, m.NewVolumeName).after(time.Second), nil
	}
	from, s, err := r.sender(ctx, id)
	if s != nil || err != nil {
		return s, err
	}
	if receiver == nil {
		return r.create(ctx, id, "Job", newReceiver(id, r.Options.MoveImage, from, claim.UID))
	}
	args := receiver.Spec.Template.Spec.Containers[0].Args
	if objects.Ended(receiver).Type == "" && !slices.Equal(args,
		newReceiver(id, "", from, "").Spec.Template.Spec.Containers[0].Args) {
		// The sender was restarted on another node.
		return moving(v1alpha1.ReasonCopying, "the receiver begins again, because the sender did").
			after(pollInterval), r.deleteJob(ctx, receiver)
	}
	if objects.Ended(receiver).Type == batchv1.JobFailed {
		return r.failed(ctx, id, receiver, "node "+m.To+" does not receive the disk")
	}
	return r.receiving(ctx, id, receiver)
}

// sender makes the Job that sends the disk, and returns its address. Without an address, the state
// has the reason.
func (r *Reconciler) sender(ctx context.Context, id *v1alpha1.VMIdentity) (address string,
	s *state, err error) {
	job, s, err := r.job(ctx, id, sendJob(id))
	if s != nil || err != nil {
		return "", s, err
	}
	if job == nil {
		s, err := r.create(ctx, id, "Job", newSender(id, r.Options.MoveImage))
		return "", s, err
	}
	switch objects.Ended(job).Type {
	case batchv1.JobFailed:
		s, err := r.failed(ctx, id, job, "the node of the disk does not send it")
		return "", s, err
	case batchv1.JobComplete:
		// The receiver will finish in a moment, or it failed after it had the disk.
		s, err := r.failed(ctx, id, job, "the disk was sent, but the receiver has not confirmed it")
		return "", s, err
	}
	pod, err := r.podOf(ctx, id, job)
	if err != nil {
		return "", nil, err
	}
	if pod == nil {
		return "", moving(v1alpha1.ReasonCopying, "Job %s has no pod yet", job.Name).
			after(pollInterval), nil
	}
	if pod.Status.Phase == corev1.PodRunning && pod.Status.PodIP != "" {
		if gone, err := r.nodeProblem(ctx, pod.Spec.NodeName); gone != "" || err != nil {
			return "", r.sourceGone(id, "%s", gone), err
		}
		return pod.Status.PodIP, nil, nil
	}
	if why := objects.Unschedulable(pod); why != nil {
		return "", r.sourceGone(id, "no node can read its volume: %s", why.Message), nil
	}
	if gone, err := r.nodeProblem(ctx, pod.Spec.NodeName); gone != "" || err != nil {
		return "", r.sourceGone(id, "%s", gone), err
	}
	return "", moving(v1alpha1.ReasonCopying, "pod %s on the node of the disk is starting",
		pod.Name).after(pollInterval), nil
}

// sourceGone reports that the disk cannot be read.
func (r *Reconciler) sourceGone(id *v1alpha1.VMIdentity, format string, args ...any) *state {
	return moving(v1alpha1.ReasonSourceGone, "the disk is to be moved to node %s and cannot be "+
		"read: %s. Bring that back, or ask for the disk where it was; nothing was deleted",
		id.Status.Move.To, fmt.Sprintf(format, args...)).after(afterFailed)
}

func (r *Reconciler) nodeProblem(ctx context.Context, name string) (string, error) {
	if name == "" {
		return "", nil
	}
	node, err := findNode(ctx, r.Live, name)
	if err != nil {
		return "", err
	}
	if node == nil {
		return fmt.Sprintf("node %s has gone", name), nil
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return fmt.Sprintf("node %s is not ready", name), nil
		}
	}
	return "", nil
}

// receiving reports the progress of the receiver.
func (r *Reconciler) receiving(ctx context.Context, id *v1alpha1.VMIdentity, job *batchv1.Job) (
	*state, error) {
	m := id.Status.Move
	pod, err := r.podOf(ctx, id, job)
	if err != nil {
		return nil, err
	}
	if pod != nil {
		if why := objects.Unschedulable(pod); why != nil {
			return moving(v1alpha1.ReasonTargetFailed, "node %s cannot take the disk: %s. It "+
				"stays where it was", m.To, why.Message).after(afterFailed), nil
		}
		gone, err := r.nodeProblem(ctx, pod.Spec.NodeName)
		if gone != "" || err != nil {
			return moving(v1alpha1.ReasonTargetFailed, "%s and cannot take the disk. It stays "+
				"where it was", gone).after(afterFailed), err
		}
	}
	return moving(v1alpha1.ReasonCopying, "the disk is copied to node %s by pods of the Jobs %s "+
		"and %s", m.To, sendJob(id), receiveJob(id)).after(afterFailed), nil
}

// failed reports why a Job failed. After a while both Jobs are deleted, and the copy begins again.
func (r *Reconciler) failed(ctx context.Context, id *v1alpha1.VMIdentity, job *batchv1.Job,
	what string) (*state, error) {
	said, err := objects.LastWords(ctx, r.Client, job, batchv1.JobNameLabel)
	if err != nil {
		return nil, err
	}
	s := moving(v1alpha1.ReasonTargetFailed, "%s: %s. It is tried again; the disk stays where it "+
		"was", what, cmp.Or(said, "its pods are gone"))
	if left := objects.Left(objects.Ended(job), afterFailed); left > 0 {
		return s.after(left), nil
	}
	for _, name := range []string{receiveJob(id), sendJob(id)} {
		job, _, err := r.job(ctx, id, name)
		if err == nil && job != nil {
			err = r.deleteJob(ctx, job)
		}
		if err != nil {
			return nil, err
		}
	}
	return s.after(pollInterval), nil
}

// create makes an object for a move, and records its UID at once. If that fails, the object is not
// trusted, and made again: anybody can make an object with this name, labels and owner.
func (r *Reconciler) create(ctx context.Context, id *v1alpha1.VMIdentity, kind string,
	o client.Object) (*state, error) {
	if err := r.Create(ctx, o, client.FieldOwner(v1alpha1.FieldManager)); err != nil {
		return refused(id, "the "+kind+" "+o.GetName(), err)
	}
	before := id.DeepCopy()
	if id.Status.Move.Made == nil {
		id.Status.Move.Made = make(map[string]types.UID)
	}
	id.Status.Move.Made[o.GetName()] = o.GetUID()
	// Only this controller writes the map, so other changes of the status do not matter.
	if err := r.Status().Patch(ctx, id, client.MergeFrom(before),
		client.FieldOwner(v1alpha1.FieldManager)); err != nil {
		return nil, fmt.Errorf("status: %w", err)
	}
	return refused(id, o.GetName(), nil)
}

// notOfMove reports whether an object cannot be used for a move: it was not made by this
// controller, or it is being deleted.
func notOfMove(id *v1alpha1.VMIdentity, o client.Object) bool {
	made := id.Status.Move.Made[o.GetName()]
	return made == "" || made != o.GetUID() || !metav1.IsControlledBy(o, id) ||
		o.GetDeletionTimestamp() != nil
}

// made reports whether this controller has made an object that is notOfMove, so that it may delete
// it. The status may be older than the object: the cache is late, or another leader has made it.
func (r *Reconciler) made(ctx context.Context, id *v1alpha1.VMIdentity, o client.Object) (
	bool, error) {
	if !metav1.IsControlledBy(o, id) {
		return false, nil
	}
	if err := r.Fresh(ctx, id); err != nil {
		return false, fmt.Errorf("%s is not of the move, by a status that may be old: %w",
			o.GetName(), err)
	}
	return true, nil
}

// job returns a Job of a move from the cache, or nil. A state reports that another Job has its
// name.
func (r *Reconciler) job(ctx context.Context, id *v1alpha1.VMIdentity, name string) (
	*batchv1.Job, *state, error) {
	job, err := objects.Find[batchv1.Job](ctx, r.Client, "job",
		client.ObjectKey{Namespace: id.Namespace, Name: name})
	if job == nil || !notOfMove(id, job) {
		return job, nil, err
	}
	mine, err := r.made(ctx, id, job)
	if mine {
		err = r.deleteJob(ctx, job)
	}
	return nil, moving(v1alpha1.ReasonCopying, "Job %s is of an earlier try, or not of this move: "+
		"the move goes on when it is gone", name).after(pollInterval), err
}

func (r *Reconciler) deleteJob(ctx context.Context, job *batchv1.Job) error {
	return objects.DeleteJob(ctx, r.Client, job, metav1.DeletePropagationBackground)
}

// podOf returns the pod of a Job that has not ended, or nil.
func (r *Reconciler) podOf(ctx context.Context, id *v1alpha1.VMIdentity, job *batchv1.Job) (
	*corev1.Pod, error) {
	var all corev1.PodList
	if err := r.List(ctx, &all, client.InNamespace(id.Namespace),
		client.MatchingLabels{labelMove: id.Name}); err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	for i := range all.Items {
		p := &all.Items[i]
		if metav1.IsControlledBy(p, job) && !objects.Finished(p) && p.DeletionTimestamp == nil {
			return p, nil
		}
	}
	return nil, nil
}

// refused returns nil if an object was made, or else why the API server does not accept it.
func refused(id *v1alpha1.VMIdentity, what string, err error) (*state, error) {
	switch {
	case err == nil:
		return moving(v1alpha1.ReasonCopying, "the disk is moved to node %s",
			id.Status.Move.To).after(time.Second), nil
	case apierrors.IsAlreadyExists(err):
		return moving(v1alpha1.ReasonCopying, "%s is there already: if it is not of this "+
			"VMIdentity, delete it", what).after(pollInterval), nil
	}
	if reason, message := objects.Refused(err, what); reason != "" {
		if reason == v1alpha1.ReasonInvalid {
			reason = v1alpha1.ReasonFailed
		}
		return moving(reason, "the disk is to be moved, and %s", message).after(afterFailed), nil
	}
	return nil, fmt.Errorf("%s: %w", what, err)
}
