package pod

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// carryOut writes a decision: first the user of the UUID, then the user of the disk, then the
// credential if it was deleted, and last the gate. Each step is durable before the next. The
// credential must be made while no process uses the old one, because its password is new.
func (r *Reconciler) carryOut(ctx context.Context, d *decision) error {
	var err error
	switch {
	case d.next != nil:
		err = r.takeUUID(ctx, d.set, d.next)
	case d.freed != nil:
		err = r.freeUUID(ctx, d.id, d.freed)
	}
	if err != nil {
		return err
	}
	if err := objects.PatchStatus(ctx, r.Client, d.before, d.id); err != nil {
		return fmt.Errorf("status of VMIdentity %s: %w", d.id.Name, err)
	}
	r.Tell(d.before, d.id, objects.EventType)
	// A pod with attachment Service uses the server's credential. If that was deleted, a new one
	// would fit neither the server nor the machines that are logged in.
	if len(d.start) > 0 && d.id.Spec.Attachment != v1alpha1.Service {
		made, err := identity.MakeSecret(ctx, r.Client, d.id)
		if err != nil {
			return fmt.Errorf("secret: %w", err)
		}
		if made {
			objects.Event(r.Events, d.id, d.start[0].Pod, v1alpha1.ReasonSecretMissing,
				identity.SecretMissing(d.id))
		}
	}
	for _, p := range d.start {
		id := client.ObjectKeyFromObject(d.id)
		if err := r.ungate(ctx, p, annotations(d.id, p)); err != nil {
			// A policy of the cluster may forbid changes of pods. A gate that has moved, by a cache
			// that is late, is another answer.
			reason, message := objects.Refused(err, "that its gate is removed")
			if reason == v1alpha1.ReasonFailed {
				r.tell(id, p, &waitingPod{p.UID, reason, fmt.Sprintf("pod %s waits: %s", p.Name,
					message)})
			}
			return err
		}
		r.seen.First(note{id, p.UID, opened})
	}
	return nil
}

// annotations are the data of an identity that a pod gets before it is scheduled. If the identity
// has no size or block size, the pod gets an empty one: a restored pod may have an earlier one.
func annotations(id *v1alpha1.VMIdentity, p objects.Asking) map[string]string {
	all, number := make(map[string]string), p.Number
	if id.Spec.FirmwareUUID != "" && number == 0 {
		all[v1alpha1.AnnotationFirmwareUUID] = id.Spec.FirmwareUUID
	}
	for name, n := range map[string]int64{v1alpha1.AnnotationSize: id.Spec.Bytes(),
		v1alpha1.AnnotationBlockSize: int64(id.Spec.BlockSize)} {
		name = v1alpha1.Numbered(name, number)
		if _, has := p.Annotations[name]; has {
			all[name] = ""
		}
		if n > 0 && id.Spec.Attachment != v1alpha1.Service {
			all[name] = strconv.FormatInt(n, 10)
		}
	}
	if id.Spec.Attachment == v1alpha1.Service && admission.Machine(p.Pod) != "" {
		all[v1alpha1.Numbered(v1alpha1.AnnotationDisk, number)] = v1alpha1.DiskURI(hostOf(id))
	}
	return all
}

// ungate gives a pod its annotations, and removes the gate of an identity from exactly this pod.
// Others may write the pod at the same time.
func (r *Reconciler) ungate(ctx context.Context, p objects.Asking, add map[string]string) error {
	path := fmt.Sprintf("/spec/schedulingGates/%d", p.Gate)
	steps := []map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": p.UID},
		{"op": "test", "path": path + "/name", "value": p.Spec.SchedulingGates[p.Gate].Name},
		{"op": "remove", "path": path},
	}
	if len(p.Spec.SchedulingGates) == 1 {
		steps[2]["path"] = "/spec/schedulingGates"
	}
	// A pod without annotations names no set, so this pod has some.
	for _, name := range slices.Sorted(maps.Keys(add)) {
		steps = append(steps, map[string]any{"op": "add", "value": add[name],
			"path": "/metadata/annotations/" + strings.ReplaceAll(name, "/", "~1")}) // RFC 6901
	}
	data, err := json.Marshal(steps)
	if err != nil {
		return err
	}
	name := p.Name
	err = r.Patch(ctx, p.DeepCopy(), client.RawPatch(types.JSONPatchType, data),
		client.FieldOwner(v1alpha1.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil // its end is an event of its own
	}
	if err != nil {
		return fmt.Errorf("gate of pod %s: %w", name, err)
	}
	return nil
}
