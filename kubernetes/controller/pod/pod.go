package pod

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Reconciler gives disks to pods. Its requests name identities, not pods, so that one place decides
// which pod gets a disk.
type Reconciler struct {
	objects.Kit
	seen objects.Once // notes
}

// waitingPod is a pod at its gate, and why it waits.
type waitingPod struct {
	pod             types.UID
	reason, message string
}

// pollInterval is the time between two checks of state that no event announces.
const pollInterval = 30 * time.Second

// Reconcile decides who uses one identity.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pods, err := r.pods(ctx, req.NamespacedName)
	if err != nil {
		return ctrl.Result{}, err
	}
	before := &v1alpha1.VMIdentity{}
	err = r.Get(ctx, req.NamespacedName, before)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	waiting := slices.DeleteFunc(slices.Clone(pods), func(p objects.Asking) bool {
		return !p.Waits() || r.seen.Known(note{req.NamespacedName, p.UID, opened})
	})
	if err != nil {
		if len(waiting) == 0 {
			return ctrl.Result{}, nil
		}
		return r.createIdentity(ctx, req.NamespacedName, waiting[0])
	}
	d := decision{before: before, id: before.DeepCopy(), pods: pods, waiting: waiting}
	if err := r.decide(ctx, &d); err != nil {
		return ctrl.Result{}, err
	}
	return d.result, r.carryOut(ctx, &d)
}

// pods returns the pods that ask for an identity and have not ended, oldest first.
func (r *Reconciler) pods(ctx context.Context, id types.NamespacedName) ([]objects.Asking, error) {
	var list corev1.PodList
	if err := r.List(ctx, &list, client.InNamespace(id.Namespace),
		client.MatchingFields{objects.IndexIdentity: id.Name}); err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	return objects.AskingFor(list.Items, id.Name), nil
}

// createIdentity makes the identity of a pod.
func (r *Reconciler) createIdentity(ctx context.Context, name types.NamespacedName,
	p objects.Asking) (ctrl.Result, error) {
	// The properties of the disk are final. Admission used the present set, but the cache may still
	// have an earlier one.
	set, err := r.set(ctx, r.Live, p)
	if err != nil {
		return ctrl.Result{}, err
	}
	if set == nil {
		r.tell(name, p, setMissing(p))
		return ctrl.Result{}, nil
	}
	id := newIdentity(name, set)
	err = r.Create(ctx, id, client.FieldOwner(v1alpha1.FieldManager))
	if _, message := objects.Refused(err, "its VMIdentity "+name.Name); message != "" {
		r.tell(name, p, &waitingPod{p.UID, v1alpha1.ReasonInvalid,
			fmt.Sprintf("pod %s waits: %s", p.Name, message)})
		return ctrl.Result{}, err
	}
	if client.IgnoreAlreadyExists(err) != nil {
		return ctrl.Result{}, fmt.Errorf("VMIdentity %s: %w", name.Name, err)
	}
	return ctrl.Result{}, nil
}

// set returns the VMIdentitySet that a pod names, or nil.
func (r *Reconciler) set(ctx context.Context, from client.Reader, p objects.Asking) (
	*v1alpha1.VMIdentitySet, error) {
	return objects.Find[v1alpha1.VMIdentitySet](ctx, from, "VMIdentitySet",
		client.ObjectKey{Namespace: p.Namespace, Name: p.SetName})
}

func setMissing(p objects.Asking) *waitingPod {
	return &waitingPod{p.UID, v1alpha1.ReasonSetMissing, fmt.Sprintf("pod %s waits: there is no "+
		"VMIdentitySet %s in its namespace: make it, or delete the pod", p.Name, p.SetName)}
}

// tell sends an event about a waiting pod, unless it has sent the same before.
func (r *Reconciler) tell(id types.NamespacedName, p objects.Asking, h *waitingPod) {
	if r.seen.First(note{id, h.pod, h.reason}) {
		objects.EventAs(eventType, r.Events, p.Pod, nil, h.reason, h.message)
	}
}

// eventType is the type of a waiting pod's event, or "" if the reason is usually short.
func eventType(reason string) string {
	switch reason {
	case v1alpha1.ReasonInUse, v1alpha1.ReasonSourceInUse, v1alpha1.ReasonCopying,
		v1alpha1.ReasonPointing, v1alpha1.ReasonExporting, v1alpha1.ReasonPopulating,
		v1alpha1.ReasonStarting, v1alpha1.ReasonStopping:
		return corev1.EventTypeNormal
	}
	return objects.EventType(reason)
}

func newIdentity(name types.NamespacedName, set *v1alpha1.VMIdentitySet) *v1alpha1.VMIdentity {
	id := &v1alpha1.VMIdentity{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:  name.Namespace,
			Name:       name.Name,
			Labels:     map[string]string{v1alpha1.LabelIdentity: name.Name},
			Finalizers: []string{v1alpha1.Finalizer},
		},
		Spec: v1alpha1.VMIdentitySpec{DiskSpec: *set.Spec.DeepCopy(), SetName: set.Name},
	}
	if id.Spec.Follow != nil {
		id.Spec.Image, id.Spec.FollowedTag, id.Spec.Follow = set.NewImage(), id.Spec.Follow.Tag, nil
	}
	if len(set.Name) <= maxLabel {
		id.Labels[v1alpha1.LabelSet] = set.Name
	}
	if id.Spec.FirmwareUUIDPolicy == v1alpha1.PerPod {
		id.Spec.FirmwareUUID = uuidOf(set.Spec.FirmwareUUID, name.Name)
	}
	return id
}

// maxLabel is the longest value of a label, in bytes.
const maxLabel = 63

// note is the last action for a waiting pod of an identity: the reason of the last event, or
// opened. It prevents a second event, and a second attempt to open a gate that the cache still has.
type note struct {
	identity types.NamespacedName
	pod      types.UID
	what     string
}

// opened is the note for a pod whose gate was removed.
const opened = "opened"
