package service

import (
	"context"
	"fmt"
	"net"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// labelVolume is on a claim that is bound to the LUN of an identity.
const labelVolume = v1alpha1.Group + "/volume"

// volumeName is the name of the PersistentVolume of an identity. Volumes have no namespace.
func volumeName(id *v1alpha1.VMIdentity) string { return "vmid-" + string(id.UID) }

// volumeSize is the size in the volume's spec. Kubernetes does not compare it with the LUN.
func (r *Reconciler) volumeSize(id *v1alpha1.VMIdentity) resource.Quantity {
	if id.Spec.Size != nil {
		return *id.Spec.Size
	}
	return r.Options.ClaimSize
}

// accessModes are the access modes of the volume: for one pod, unless the identity requests more.
func accessModes(id *v1alpha1.VMIdentity) ([]corev1.PersistentVolumeAccessMode, error) {
	mode := corev1.PersistentVolumeAccessMode(id.Annotations[v1alpha1.AnnotationVolumeAccess])
	switch mode {
	case "":
		mode = corev1.ReadWriteOncePod
	case corev1.ReadWriteOncePod, corev1.ReadWriteOnce, corev1.ReadWriteMany:
	default:
		return nil, fmt.Errorf("annotation %s: %q is unknown: want %s, %s or %s",
			v1alpha1.AnnotationVolumeAccess, mode, corev1.ReadWriteOncePod, corev1.ReadWriteOnce,
			corev1.ReadWriteMany)
	}
	return []corev1.PersistentVolumeAccessMode{mode}, nil
}

func (r *Reconciler) newVolume(id *v1alpha1.VMIdentity, address, claim string,
	modes []corev1.PersistentVolumeAccessMode) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: volumeName(id),
			Labels: map[string]string{v1alpha1.LabelIdentity: id.Name}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: r.volumeSize(id)},
			AccessModes: modes,
			VolumeMode:  new(corev1.PersistentVolumeBlock),
			// The disk must outlive its claim.
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef: &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: id.Namespace, Name: claim},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				ISCSI: &corev1.ISCSIPersistentVolumeSource{
					// A node cannot resolve the names of Services.
					TargetPortal: net.JoinHostPort(address, strconv.Itoa(iscsiPort)),
					IQN:          targetName(id),
					Lun:          lun,
					// The kubelet does a discovery before it logs in.
					DiscoveryCHAPAuth: true,
					SessionCHAPAuth:   true,
					SecretRef: &corev1.SecretReference{Namespace: id.Namespace,
						Name: id.Status.SecretName},
				}},
		},
	}
}

func (r *Reconciler) newClaim(id *v1alpha1.VMIdentity, name string,
	modes []corev1.PersistentVolumeAccessMode) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: objects.MetaOf(id, name),
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes:      modes,
			VolumeMode:       new(corev1.PersistentVolumeBlock),
			StorageClassName: new(""), // no class should make a volume for it
			VolumeName:       volumeName(id),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: r.volumeSize(id)}},
		}}
	c.Labels[labelVolume] = id.Name
	return c
}

// volume makes the volume that an identity requests, with its claim, and removes other volumes and
// claims. It returns condition VolumeReady, or nil if there should be no volume.
func (r *Reconciler) volume(ctx context.Context, id *v1alpha1.VMIdentity, address string) (
	*metav1.Condition, error) {
	name := id.Annotations[v1alpha1.AnnotationVolumeClaim]
	var all corev1.PersistentVolumeClaimList
	if err := r.Client.List(ctx, &all, client.InNamespace(id.Namespace),
		client.MatchingLabels{labelVolume: id.Name}); err != nil {
		return nil, err
	}
	var have *corev1.PersistentVolumeClaim
	for i := range all.Items {
		if one := &all.Items[i]; one.Name == name && objects.Belongs(one, id) {
			have = one
		}
	}
	modes, err := accessModes(id)
	switch {
	case name == "":
		if err := r.dropVolume(ctx, id, all.Items); err != nil {
			return failed(volumeCondition, "that the volume is deleted", err)
		}
		return nil, nil
	case !r.Options.Volumes:
		return volumeCondition(v1alpha1.ReasonInvalid, "PersistentVolumes are turned off: the "+
			"administrator can turn them on (persistentVolumes.create of the chart)"), nil
	case err != nil:
		return volumeCondition(v1alpha1.ReasonInvalid, err.Error()), nil
	case name == id.Status.ClaimName:
		return volumeCondition(v1alpha1.ReasonInvalid, fmt.Sprintf("annotation %s: %s is the "+
			"claim of the data: choose another name", v1alpha1.AnnotationVolumeClaim, name)), nil
	case have == nil && len(all.Items) > 0:
		return volumeCondition(v1alpha1.ReasonInvalid, fmt.Sprintf("the volume has the claim %s, "+
			"and annotation %s says %s: remove the annotation until that claim is gone",
			all.Items[0].Name, v1alpha1.AnnotationVolumeClaim, name)), nil
	case have != nil && have.DeletionTimestamp != nil:
		return volumeCondition(v1alpha1.ReasonDeleting, fmt.Sprintf("the claim %s is being "+
			"deleted, and made again afterwards", name)), nil
	case have != nil && have.Status.Phase == corev1.ClaimLost:
		return volumeCondition(v1alpha1.ReasonClaimLost, fmt.Sprintf("the volume of the claim %s "+
			"was deleted: delete the claim, and both are made again", name)), nil
	case have != nil && have.Status.Phase == corev1.ClaimBound:
		c := volumeCondition(v1alpha1.ReasonClaimBound,
			fmt.Sprintf("the claim %s has the LUN as a block volume", name))
		c.Status = metav1.ConditionTrue
		return c, nil
	}
	pending := volumeCondition(v1alpha1.ReasonClaimPending,
		fmt.Sprintf("the claim %s is being bound to the LUN; if that lasts, delete the claim, and "+
			"it is made again", name))
	switch {
	case !hasCondition(id, v1alpha1.ConditionVolumeReady):
		return pending, nil // the change triggers another reconcile, with the volume in the cache
	case have == nil: // the claim is the last of the two
		if err := r.makeVolume(ctx, id, r.newVolume(id, address, name, modes)); err != nil {
			return failed(volumeCondition, "the PersistentVolume "+volumeName(id), err)
		}
		if err := r.New(ctx, r.newClaim(id, name, modes)); err != nil {
			return failed(volumeCondition, "the claim "+name, err)
		}
	}
	return pending, nil
}

// noClaim removes the UID of a claim from a volume, which stays reserved by the claim's name.
var noClaim = client.RawPatch(types.MergePatchType,
	[]byte(`{"spec":{"claimRef":{"uid":null,"resourceVersion":null}}}`))

// makeVolume makes a volume for a claim, unless the claim exists. A volume that had an earlier
// claim of that name is freed for this one.
func (r *Reconciler) makeVolume(ctx context.Context, id *v1alpha1.VMIdentity,
	volume *corev1.PersistentVolume) error {
	claim, err := objects.ClaimOf(ctx, r.Live, id.Namespace, volume.Spec.ClaimRef.Name)
	if claim != nil || err != nil {
		return err
	}
	if err := objects.Apply(ctx, r.Client, volume); err != nil {
		return err
	}
	return r.Client.Patch(ctx, volume, noClaim, client.FieldOwner(v1alpha1.FieldManager))
}

// dropVolume removes claims of a volume, and the volume. Kubernetes keeps them while a pod uses
// them.
func (r *Reconciler) dropVolume(ctx context.Context, id *v1alpha1.VMIdentity,
	claims []corev1.PersistentVolumeClaim) error {
	for i := range claims {
		if claims[i].DeletionTimestamp != nil || !objects.Belongs(&claims[i], id) {
			continue
		}
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, &claims[i],
			client.Preconditions{UID: &claims[i].UID})); err != nil {
			return err
		}
	}
	// Without volumes, the controller has no right to look. Condition VolumeReady is written before
	// a volume is made.
	if !r.Options.Volumes || !hasCondition(id, v1alpha1.ConditionVolumeReady) {
		return nil
	}
	volume := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: volumeName(id)}}
	return client.IgnoreNotFound(r.Client.Delete(ctx, volume))
}

func volumeCondition(reason, message string) *metav1.Condition {
	return &metav1.Condition{Type: v1alpha1.ConditionVolumeReady, Status: metav1.ConditionFalse,
		Reason: reason, Message: message}
}

// failed returns the condition after a failed request, if people can solve the problem, and the
// error if another try may help.
func failed(condition func(reason, message string) *metav1.Condition, what string, err error) (
	*metav1.Condition, error) {
	_, message := objects.Refused(err, what)
	if apierrors.IsAlreadyExists(err) {
		message = what + " is there already, and not of this VMIdentity: delete or rename it"
	}
	err = fmt.Errorf("%s: %w", what, err)
	if message == "" {
		return nil, err
	}
	return condition(v1alpha1.ReasonFailed, message), err
}
