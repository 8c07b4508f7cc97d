package local

import (
	"cmp"
	"context"
	"fmt"
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

// annotationReclaim on a volume records its own policy while it has Retain.
const annotationReclaim = v1alpha1.Group + "/reclaim-policy"

// point gives the volume with the copied disk to the claim of the identity.
func (r *Reconciler) point(ctx context.Context, id *v1alpha1.VMIdentity) (*state, error) {
	m := id.Status.Move
	wait := func(format string, args ...any) *state {
		return moving(v1alpha1.ReasonPointing, format, args...).after(time.Second)
	}
	fresh, err := objects.Volume(ctx, r.Live, m.NewVolumeName, m.NewVolumeUID)
	if err != nil {
		return nil, err
	}
	former, err := objects.Volume(ctx, r.Live, m.VolumeName, m.VolumeUID)
	if err != nil {
		return nil, err
	}
	if !objects.BoundTo(former, m.ClaimUID) {
		former = nil // it was given to another claim
	}
	claim, err := objects.Claim(ctx, r.Live, id)
	if err != nil {
		return nil, err
	}
	if fresh == nil && claim != nil && claim.UID == m.ClaimUID && claim.DeletionTimestamp == nil {
		m.Step, m.NewVolumeName, m.NewVolumeUID = v1alpha1.Copy, "", ""
		return moving(v1alpha1.ReasonCopying, "the volume with the moved disk is gone: it is "+
			"copied again").after(pollInterval), r.release(ctx, former)
	}
	if fresh == nil && former != nil && (claim == nil || claim.UID == m.ClaimUID) {
		// The former volume has the whole disk, too.
		m.To, m.NewVolumeName, m.NewVolumeUID = m.From, m.VolumeName, m.VolumeUID
		return wait("the volume with the moved disk is gone: the claim gets the former one"), nil
	}
	if fresh == nil {
		return moving(v1alpha1.ReasonClaimLost, "the volume %s with the moved disk is gone: bring "+
			"it back; volume %s had the disk, too", m.NewVolumeName, m.VolumeName).
			after(afterFailed), nil
	}
	if !mine(id, fresh) {
		ref := fresh.Spec.ClaimRef
		return moving(v1alpha1.ReasonClaimForeign, "the volume %s with the moved disk belongs to "+
			"the claim %s in namespace %s, and is not taken from it; volume %s also has the disk",
			fresh.Name, ref.Name, ref.Namespace, m.VolumeName).after(afterFailed), nil
	}
	if claim != nil && claim.UID != m.ClaimUID {
		if !metav1.IsControlledBy(claim, id) || claim.Spec.VolumeName != fresh.Name {
			return moving(v1alpha1.ReasonClaimForeign, "the claim %s is not of this VMIdentity: "+
				"delete it; the volume %s has the disk", claim.Name, fresh.Name).
				after(pollInterval), nil
		}
		return r.finish(ctx, id, claim, fresh, former)
	}
	for _, v := range []*corev1.PersistentVolume{fresh, former} {
		if err := r.keep(ctx, v); err != nil {
			return nil, err
		}
	}
	if gone, err := r.clean(ctx, id); !gone || err != nil {
		return wait("what moved the disk is ending"), err
	}
	if claim != nil {
		if user, err := r.user(ctx, id); user != "" || err != nil {
			return moving(v1alpha1.ReasonInUse, "pod %s uses the disk, although it is being "+
				"moved: delete the pod", user).after(pollInterval), err
		}
		return wait("the claim %s is deleted; both volumes stay", claim.Name),
			objects.DeleteClaim(ctx, r.Client, claim)
	}
	if err := r.reserve(ctx, fresh, id); err != nil {
		return nil, err
	}
	err = r.Create(ctx, newClaim(id, v1alpha1.ClaimName(id.Name), fresh.Spec.StorageClassName,
		fresh.Name), client.FieldOwner(v1alpha1.FieldManager))
	s, err := refused(id, "the claim "+v1alpha1.ClaimName(id.Name), err)
	if s != nil && s.reason == v1alpha1.ReasonCopying {
		s = wait("the claim %s gets the volume %s", v1alpha1.ClaimName(id.Name), fresh.Name)
	}
	return s, err
}

// finish ends the move when the claim has the new volume.
func (r *Reconciler) finish(ctx context.Context, id *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim, fresh, former *corev1.PersistentVolume) (*state, error) {
	m := id.Status.Move
	if claim.Status.Phase != corev1.ClaimBound || !objects.BoundTo(fresh, claim.UID) {
		return moving(v1alpha1.ReasonPointing, "the claim %s is being bound to the volume %s",
			claim.Name, fresh.Name).after(time.Second), nil
	}
	// Wait for the cache: other controllers would take the old claim in it for the new one.
	cached := &corev1.PersistentVolumeClaim{}
	err := r.Get(ctx, client.ObjectKeyFromObject(claim), cached)
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	if err != nil || cached.UID != claim.UID || cached.Status.Phase != corev1.ClaimBound {
		return moving(v1alpha1.ReasonPointing, "the claim %s has the volume %s", claim.Name,
			fresh.Name).after(time.Second), nil
	}
	for _, v := range []*corev1.PersistentVolume{fresh, former} {
		if err := r.release(ctx, v); err != nil {
			return nil, err
		}
	}
	id.Status.Move = nil
	id.Status.NodeName = m.To
	if m.NewVolumeName == m.VolumeName {
		return stays(v1alpha1.ReasonStays, "the disk is where it was: the volume to which it was "+
			"moved has gone"), nil
	}
	from := cmp.Or(m.From, "its former node")
	return stays(v1alpha1.ReasonMoved, "the disk was moved from %s to %s", from, m.To), nil
}

// mine reports whether the volume with the moved disk may get the claim of the identity: it belongs
// to the filled claim, is reserved for or bound to the identity's claim, or has no claim.
func mine(id *v1alpha1.VMIdentity, v *corev1.PersistentVolume) bool {
	ref := v.Spec.ClaimRef
	switch {
	case ref == nil:
		return true
	case ref.Namespace != id.Namespace:
		return false
	case ref.Name == moveClaim(id):
		return id.Status.Move.Made[ref.Name] == ref.UID
	}
	return ref.Name == v1alpha1.ClaimName(id.Name)
}

// keep makes a volume outlive its claim.
func (r *Reconciler) keep(ctx context.Context, v *corev1.PersistentVolume) error {
	if v == nil || v.Annotations[annotationReclaim] != "" {
		return nil
	}
	return r.change(ctx, v, func() {
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, annotationReclaim,
			string(v.Spec.PersistentVolumeReclaimPolicy))
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	})
}

// release restores a volume's own policy.
func (r *Reconciler) release(ctx context.Context, v *corev1.PersistentVolume) error {
	if v == nil || v.Annotations[annotationReclaim] == "" {
		return nil
	}
	return r.change(ctx, v, func() {
		v.Spec.PersistentVolumeReclaimPolicy =
			corev1.PersistentVolumeReclaimPolicy(v.Annotations[annotationReclaim])
		delete(v.Annotations, annotationReclaim)
	})
}

// reserve reserves a volume for the claim of an identity.
func (r *Reconciler) reserve(ctx context.Context, v *corev1.PersistentVolume,
	id *v1alpha1.VMIdentity) error {
	name := v1alpha1.ClaimName(id.Name)
	ref := v.Spec.ClaimRef
	if ref != nil && ref.Namespace == id.Namespace && ref.Name == name && ref.UID == "" {
		return nil
	}
	return r.change(ctx, v, func() {
		v.Spec.ClaimRef = &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim",
			Namespace: id.Namespace, Name: name}
	})
}

// change writes a volume, unless it was written since it was read.
func (r *Reconciler) change(ctx context.Context, v *corev1.PersistentVolume, do func()) error {
	before := v.DeepCopy()
	do()
	if err := r.Patch(ctx, v, objects.Lock(before),
		client.FieldOwner(v1alpha1.FieldManager)); err != nil {
		return fmt.Errorf("volume %s: %w", v.Name, err)
	}
	return nil
}

// clean removes the objects that move a disk: the Jobs with their pods, and then the filled claim.
// It returns whether everything is gone.
func (r *Reconciler) clean(ctx context.Context, id *v1alpha1.VMIdentity) (gone bool, err error) {
	var jobs batchv1.JobList
	err = r.Live.List(ctx, &jobs, client.InNamespace(id.Namespace),
		client.MatchingLabels{labelMove: id.Name})
	// Without moves, the controller may have no right to Jobs. Kubernetes deletes them with the
	// identity, and a person may do so earlier.
	if err != nil && !(r.off() && apierrors.IsForbidden(err)) {
		return false, fmt.Errorf("jobs: %w", err)
	}
	gone = true
	strangers := make(map[types.UID]bool)
	for i := range jobs.Items {
		job := &jobs.Items[i]
		if !metav1.IsControlledBy(job, id) {
			strangers[job.UID] = true
			continue
		}
		gone = false
		if err := r.deleteJob(ctx, job); err != nil {
			return false, err
		}
	}
	var pods corev1.PodList
	if err := r.Live.List(ctx, &pods, client.InNamespace(id.Namespace),
		client.MatchingLabels{labelMove: id.Name}); err != nil {
		return false, fmt.Errorf("pods: %w", err)
	}
	for i := range pods.Items {
		owner := metav1.GetControllerOf(&pods.Items[i])
		if !objects.Finished(&pods.Items[i]) && (owner == nil || !strangers[owner.UID]) {
			gone = false
		}
	}
	if !gone {
		return false, nil
	}
	claim, err := objects.ClaimOf(ctx, r.Live, id.Namespace, moveClaim(id))
	if err != nil || claim == nil || !metav1.IsControlledBy(claim, id) {
		return err == nil, err
	}
	return false, objects.DeleteClaim(ctx, r.Client, claim)
}
