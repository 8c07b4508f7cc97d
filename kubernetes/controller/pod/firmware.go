package pod

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// fixed reports whether only one machine of the set at a time has the firmwareUUID.
func fixed(id *v1alpha1.VMIdentity) bool {
	return id.Spec.FirmwareUUID != "" && id.Spec.FirmwareUUIDPolicy != v1alpha1.PerPod
}

// waitForUUID returns why a pod must wait for the UUID of its set. If it need not wait, the
// decision records that the set should name the pod.
func (r *Reconciler) waitForUUID(ctx context.Context, d *decision, set *v1alpha1.VMIdentitySet,
	p objects.Asking) (*waitingPod, error) {
	if ref := set.Status.UsedBy; ref != nil && ref.UID == p.UID {
		return nil, nil
	}
	users, err := r.usersOfUUID(ctx, d.id, set)
	if err != nil {
		return nil, err
	}
	for _, ref := range users {
		live, err := r.alive(ctx, p.Namespace, ref)
		if err != nil {
			return nil, err
		}
		if live {
			d.result.RequeueAfter = pollInterval
			return &waitingPod{p.UID, v1alpha1.ReasonUUIDInUse, fmt.Sprintf("pod %s waits: pod %s "+
				"has the firmwareUUID of VMIdentitySet %s, which is for one machine at a time: "+
				"delete that pod, or make a set with firmwareUUIDPolicy PerPod", p.Name, ref.Name,
				set.Name)}, nil
		}
	}
	d.set, d.next = set, reference(p)
	return nil, nil
}

// usersOfUUID are the pods that may have the UUID of an identity: the pod that the set names, and
// those of its other identities. A set that was made again names none.
func (r *Reconciler) usersOfUUID(ctx context.Context, id *v1alpha1.VMIdentity,
	set *v1alpha1.VMIdentitySet) (users []*corev1.ObjectReference, err error) {
	var ids v1alpha1.VMIdentityList
	if err := r.List(ctx, &ids, client.InNamespace(id.Namespace),
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("VMIdentities: %w", err)
	}
	for i := range ids.Items {
		other := &ids.Items[i]
		if other.Name != id.Name && other.Spec.SetName == set.Name && fixed(other) &&
			other.Spec.FirmwareUUID == id.Spec.FirmwareUUID && other.Status.UsedBy != nil {
			users = append(users, other.Status.UsedBy)
		}
	}
	if set.Status.UsedBy != nil {
		users = append(users, set.Status.UsedBy)
	}
	return users, nil
}

// takeUUID records in a set the pod that has its UUID. nil: none.
func (r *Reconciler) takeUUID(ctx context.Context, set *v1alpha1.VMIdentitySet,
	next *corev1.ObjectReference) error {
	after := set.DeepCopy()
	after.Status.UsedBy = next
	if err := objects.PatchStatus(ctx, r.Client, set, after); err != nil {
		return fmt.Errorf("status of VMIdentitySet %s: %w", set.Name, err)
	}
	return nil
}

// freeUUID removes from a set a pod that has ended. This comes before the identity forgets the pod,
// so that a kill in between leaves nothing behind.
func (r *Reconciler) freeUUID(ctx context.Context, id *v1alpha1.VMIdentity,
	ended *corev1.ObjectReference) error {
	if !fixed(id) || id.Spec.SetName == "" {
		return nil
	}
	set := &v1alpha1.VMIdentitySet{}
	key := client.ObjectKey{Namespace: id.Namespace, Name: id.Spec.SetName}
	if err := r.Get(ctx, key, set); err != nil {
		return client.IgnoreNotFound(err)
	}
	if set.Status.UsedBy == nil || set.Status.UsedBy.UID != ended.UID {
		return nil
	}
	return r.takeUUID(ctx, set, nil)
}

// uuidOf is the SMBIOS UUID of one of many machines: version 5 (RFC 9562, section 5.5) of the set's
// UUID and the identity's name. The API server has validated the UUID. Other text is returned
// unchanged.
func uuidOf(namespace, name string) string {
	space, err := uuid.Parse(namespace)
	if err != nil {
		return namespace
	}
	return uuid.NewSHA1(space, []byte(name)).String()
}
