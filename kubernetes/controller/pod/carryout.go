package pod

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// carryOut writes a decision: first the user of the UUID, then the user of the disk, then the
// credential if it was deleted, and last the gate. Each step is durable before the next. The
// credential must be made while nobody runs with the old one, because its password is new.
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
	wrote, err := objects.PatchStatus(ctx, r.Client, d.before, d.id)
	if err != nil {
		return fmt.Errorf("status of VMIdentity %s: %w", d.id.Name, err)
	}
	if wrote {
		r.written.Note(d.id)
		objects.Tell(r.Events, d.id, nil, d.before.Status.Conditions, d.id.Status.Conditions)
	}
	// A pod with attachment Service uses the credential of the server: see holdForSecret.
	if len(d.start) > 0 && d.id.Spec.Attachment != v1alpha1.Service {
		made, err := identity.MakeSecret(ctx, r.Client, d.id)
		if err != nil {
			return fmt.Errorf("secret: %w", err)
		}
		if made {
			objects.Event(r.Events, d.id, d.start[0], v1alpha1.ReasonSecretMissing,
				identity.SecretMissing(d.id))
		}
	}
	for _, p := range d.start {
		if err := r.ungate(ctx, p, d.id.Spec.FirmwareUUID); err != nil {
			return err
		}
		r.memory.open(client.ObjectKeyFromObject(d.id), p.UID)
	}
	return nil
}

// ungate gives a pod its machine's UUID, if it has one, and removes the gate of exactly this pod.
// Others may write the pod meanwhile.
func (r *Reconciler) ungate(ctx context.Context, p *corev1.Pod, firmwareUUID string) error {
	path := fmt.Sprintf("/spec/schedulingGates/%d", objects.GateIndex(p))
	steps := []map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": p.UID},
		{"op": "test", "path": path + "/name", "value": v1alpha1.Gate},
		{"op": "remove", "path": path},
	}
	if len(p.Spec.SchedulingGates) == 1 {
		steps[2]["path"] = "/spec/schedulingGates"
	}
	if firmwareUUID != "" && p.Annotations == nil {
		steps = append(steps, map[string]any{"op": "add", "path": "/metadata/annotations",
			"value": map[string]string{v1alpha1.AnnotationFirmwareUUID: firmwareUUID}})
	} else if firmwareUUID != "" {
		name := strings.ReplaceAll(v1alpha1.AnnotationFirmwareUUID, "/", "~1") // RFC 6901
		steps = append(steps, map[string]any{"op": "add", "path": "/metadata/annotations/" + name,
			"value": firmwareUUID})
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
