package identity

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// claim returns the identity's claim. It makes one unless the identity had one that was ready.
func (r *Reconciler) claim(ctx context.Context, id *v1alpha1.VMIdentity) (
	*corev1.PersistentVolumeClaim, *verdict, error) {
	claim, err := objects.Claim(ctx, r.Client, id)
	if err == nil && claim == nil && id.Status.CreationTime != nil {
		// A claim that was made a moment ago may not be in the cache yet.
		claim, err = objects.Claim(ctx, r.Live, id)
	}
	if err != nil {
		return nil, nil, err
	}
	if claim == nil && id.Status.CreationTime != nil {
		return nil, unusable(id, v1alpha1.ReasonClaimMissing, "the claim %s was deleted, and the "+
			"data with it: restore the claim from a backup, or delete this VMIdentity, and its "+
			"pod gets a new disk", v1alpha1.ClaimName(id.Name)), nil
	}
	if claim != nil {
		return claim, nil, nil
	}
	return r.makeClaim(ctx, id)
}

// makeClaim makes the claim, unless the name of the secret is taken: see the package comment.
func (r *Reconciler) makeClaim(ctx context.Context, id *v1alpha1.VMIdentity) (
	*corev1.PersistentVolumeClaim, *verdict, error) {
	// It may be about another's claim of that name, which has gone.
	meta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionBound)
	class, wrong, err := r.ClassOf(ctx, &id.Spec.DiskSpec)
	if err != nil {
		return nil, nil, err
	}
	if wrong != "" {
		return nil, &verdict{reason: v1alpha1.ReasonInvalid, message: wrong, poll: true}, nil
	}
	claim := r.newClaim(id, class)
	why, err := r.setSource(ctx, id, class, claim)
	if why != nil || err != nil {
		return nil, why, err
	}
	if id.Status.SecretName == "" { // else an earlier claim has made it
		err = r.Create(ctx, secret(id), client.DryRunAll, client.FieldOwner(v1alpha1.FieldManager))
	}
	if apierrors.IsAlreadyExists(err) {
		// Another controller may have been faster: it makes the claim first.
		if claim, err := objects.Claim(ctx, r.Live, id); claim != nil || err != nil {
			return claim, nil, err
		}
		return nil, &verdict{reason: v1alpha1.ReasonSecretForeign, poll: true,
			message: fmt.Sprintf("the secret %s exists and is not of this VMIdentity: restore its "+
				"claim, too, if it came from a backup; or else give the VMIdentity another name, "+
				"or delete the secret", v1alpha1.SecretName(id.Name))}, nil
	}
	if why, err := refused(err, "the secret"); why != nil || err != nil {
		return nil, why, err
	}
	err = r.Create(ctx, claim, client.FieldOwner(v1alpha1.FieldManager))
	if apierrors.IsAlreadyExists(err) {
		claim, err := objects.Claim(ctx, r.Live, id)
		if err == nil && claim == nil {
			err = fmt.Errorf("claim %s: it was deleted just now", v1alpha1.ClaimName(id.Name))
		}
		return claim, nil, err
	}
	why, err = refused(err, "the claim")
	return claim, why, err
}

// setSource sets the source of a new claim. It returns why the source is not there yet.
func (r *Reconciler) setSource(ctx context.Context, id *v1alpha1.VMIdentity, class *string,
	claim *corev1.PersistentVolumeClaim) (*verdict, error) {
	if source.Empty(id) {
		return nil, nil
	}
	if why, err := r.missing(ctx, class); why != nil || err != nil {
		return why, err // the claim to be filled has no volume either
	}
	a, err := source.Finder{Kit: r.Kit}.Find(ctx, id, class)
	if why, err := noSource(a, err); why != nil || err != nil {
		return why, err
	}
	claim.Spec.DataSourceRef = a.From
	if claim.Spec.Resources.Requests.Storage().Cmp(a.AtLeast) < 0 {
		claim.Spec.Resources.Requests[corev1.ResourceStorage] = a.AtLeast
	}
	return nil, nil
}

// noSource returns why a claim is not made, or does not get a volume.
func noSource(a source.Answer, err error) (*verdict, error) {
	if a.Reason == "" || err != nil {
		return nil, err
	}
	return &verdict{reason: a.Reason, message: a.Message, poll: true}, nil
}

func (r *Reconciler) newClaim(id *v1alpha1.VMIdentity, class *string,
) *corev1.PersistentVolumeClaim {
	mode := corev1.ReadWriteOncePod
	if slices.Contains(r.Options.ReadWriteOnce, "*") ||
		class != nil && slices.Contains(r.Options.ReadWriteOnce, *class) {
		mode = corev1.ReadWriteOnce
	}
	return &corev1.PersistentVolumeClaim{
		// BlockOwnerDeletion is not set: it would need another permission, and the finalizer
		// already holds the owner. With this reference, --cascade=orphan keeps the claim.
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       id.Namespace,
			Name:            v1alpha1.ClaimName(id.Name),
			Labels:          map[string]string{v1alpha1.LabelIdentity: id.Name},
			Annotations:     map[string]string{v1alpha1.AnnotationContent: id.Spec.Content()},
			Finalizers:      []string{v1alpha1.FinalizerDisk},
			OwnerReferences: objects.Owned("VMIdentity", id),
		},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes:      []corev1.PersistentVolumeAccessMode{mode},
			StorageClassName: class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: r.SizeOfClaim(&id.Spec.DiskSpec)}},
		},
	}
}

// adopt makes a claim that a backup has restored the identity's own, if its annotation names the
// identity's content. It changes nothing else about a claim that is not the identity's. It restores
// a lost finalizer or label of the own claim. It lets a claim be deleted if the claim is being
// deleted while its identity stays, or if its identity is gone and this one only has the same name.
func (r *Reconciler) adopt(ctx context.Context, id *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim) (*corev1.PersistentVolumeClaim, error) {
	ours, deleted := metav1.IsControlledBy(claim, id), !claim.DeletionTimestamp.IsZero()
	kept := controllerutil.ContainsFinalizer(claim, v1alpha1.FinalizerDisk)
	switch {
	case ours && kept != deleted && (deleted || claim.Labels[v1alpha1.LabelIdentity] == id.Name):
		return claim, nil
	case !ours && (ownedByAnother(claim, id) || deleted && !kept):
		return claim, nil
	case !ours && !deleted && claim.Annotations[v1alpha1.AnnotationContent] != id.Spec.Content():
		return claim, nil
	}
	// The cache may not know that the identity is being deleted. In that case Kubernetes may have
	// deleted the claim, or removed the owner so that the claim stays.
	if stays, err := r.stays(ctx, id); !stays || err != nil {
		return claim, err
	}
	switch {
	case deleted && id.Status.SecretName == "":
		return claim, r.releaseForsaken(ctx, id, claim)
	case deleted:
		return claim, objects.ReleaseClaim(ctx, r.Client, claim)
	}
	after := claim.DeepCopy()
	controllerutil.AddFinalizer(after, v1alpha1.FinalizerDisk)
	metav1.SetMetaDataLabel(&after.ObjectMeta, v1alpha1.LabelIdentity, id.Name)
	after.OwnerReferences = append(slices.DeleteFunc(after.OwnerReferences, controls),
		objects.Owned("VMIdentity", id)...)
	err := r.Patch(ctx, after, objects.Lock(claim), client.FieldOwner(v1alpha1.FieldManager))
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", claim.Name, err)
	}
	return after, nil
}

// stays reports whether an identity exists and is not being deleted, according to the API server.
func (r *Reconciler) stays(ctx context.Context, id *v1alpha1.VMIdentity) (bool, error) {
	now, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Live, "VMIdentity",
		client.ObjectKeyFromObject(id))
	return now != nil && now.UID == id.UID && now.DeletionTimestamp.IsZero(), err
}

// ownedByAnother reports whether a claim has a controller other than the identity of this name. An
// earlier identity of this name is gone, so a claim of that one has no owner.
func ownedByAnother(claim *corev1.PersistentVolumeClaim, id *v1alpha1.VMIdentity) bool {
	return slices.ContainsFunc(claim.OwnerReferences, func(o metav1.OwnerReference) bool {
		return controls(o) && (o.Kind != "VMIdentity" || o.Name != id.Name ||
			!strings.HasPrefix(o.APIVersion, v1alpha1.Group+"/"))
	})
}

func controls(o metav1.OwnerReference) bool { return o.Controller != nil && *o.Controller }

// inspect records the state of a claim in the status. It returns why the claim cannot be used.
func (r *Reconciler) inspect(id *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim) *verdict {
	says := claim.Annotations[v1alpha1.AnnotationContent]
	switch {
	case metav1.IsControlledBy(claim, id):
	case ownedByAnother(claim, id):
		return unusable(id, v1alpha1.ReasonClaimForeign, "the claim %s belongs to another object: "+
			"give the VMIdentity another name", claim.Name)
	case !claim.DeletionTimestamp.IsZero() && id.Status.CreationTime == nil:
		return unusable(id, v1alpha1.ReasonClaimForeign, "the claim %s is not of this VMIdentity, "+
			"and is being deleted: there is a new one after that; `kubectl describe pvc %[1]s` "+
			"says which pod still has it", claim.Name)
	default:
		return unusable(id, v1alpha1.ReasonClaimForeign, "the claim %s exists and is not of this "+
			"VMIdentity: give the VMIdentity another name; or, if the claim has this disk, for "+
			"example from a backup: `kubectl annotate pvc %[1]s '%s=%s'`", claim.Name,
			v1alpha1.AnnotationContent, id.Spec.Content())
	}
	if says != "" && says != id.Spec.Content() { // the annotation was changed
		return unusable(id, v1alpha1.ReasonImageDiffers, "the claim %s says that it has the disk "+
			"%q, and that of this VMIdentity is %q: delete the claim; or, if it has the right "+
			"disk, correct its annotation %s", claim.Name, says, id.Spec.Content(),
			v1alpha1.AnnotationContent)
	}
	id.Status.ClaimName = claim.Name
	if size, ok := claim.Status.Capacity[corev1.ResourceStorage]; ok {
		id.Status.Size = &size
	}
	switch {
	case !claim.DeletionTimestamp.IsZero():
		return unusable(id, v1alpha1.ReasonClaimMissing, "the claim %s is being deleted, and the "+
			"data with it, when no pod uses it any more", claim.Name)
	case claim.Status.Phase == corev1.ClaimLost:
		return unusable(id, v1alpha1.ReasonClaimLost, "the volume %s of the claim %s has gone: "+
			"bring the volume back, or delete this VMIdentity", claim.Spec.VolumeName, claim.Name)
	case claim.Status.Phase == corev1.ClaimBound:
		setBound(id, metav1.ConditionTrue, v1alpha1.ReasonClaimBound,
			fmt.Sprintf("the claim %s has its volume", claim.Name))
	default:
		setBound(id, metav1.ConditionFalse, v1alpha1.ReasonClaimPending,
			fmt.Sprintf("the claim %s has no volume yet: many classes make one when a pod is "+
				"scheduled; otherwise `kubectl describe pvc %s` says why", claim.Name, claim.Name))
	}
	return nil
}

// unusable is the reason why an identity cannot use its claim, also for condition Bound.
func unusable(id *v1alpha1.VMIdentity, reason, format string, args ...any) *verdict {
	why := &verdict{reason: reason, message: fmt.Sprintf(format, args...), poll: true}
	setBound(id, metav1.ConditionFalse, why.reason, why.message)
	return why
}

// classless returns why a claim will not get a volume: its storage class does not exist. A claim
// that has a volume, or names one, needs no class. The claim is made in any case, because volumes
// made by hand may have the name of a class that does not exist.
func (r *Reconciler) classless(ctx context.Context, claim *corev1.PersistentVolumeClaim) (
	*verdict, error) {
	if claim.Status.Phase == corev1.ClaimBound || claim.Spec.VolumeName != "" {
		return nil, nil
	}
	return r.missing(ctx, claim.Spec.StorageClassName)
}

// missing reports that a storage class does not exist. When one is made, all identities without a
// volume are reconciled again.
func (r *Reconciler) missing(ctx context.Context, class *string) (*verdict, error) {
	message, err := objects.MissingClass(ctx, r, class, "VMIdentity")
	if message == "" || err != nil {
		return nil, err
	}
	return &verdict{reason: v1alpha1.ReasonClassMissing, message: message}, nil
}

func setBound(id *v1alpha1.VMIdentity, status metav1.ConditionStatus, reason, message string) {
	objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
		Type: v1alpha1.ConditionBound, Status: status, Reason: reason, Message: message})
}

// refused explains why the API server refuses an object. It returns temporary errors as they are.
func refused(err error, what string) (*verdict, error) {
	if reason, message := objects.Refused(err, what); reason != "" {
		return &verdict{reason: reason, poll: true, message: message}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return nil, nil
}
