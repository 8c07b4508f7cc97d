package service

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/status"
)

// step returns the step that the annotations of an identity request; to is "" if they request none.
// Without an annotation for the step, it is status.ActionOpen.
func step(id *v1alpha1.VMIdentity) (to string, step status.Action, err error) {
	to, step = id.Annotations[v1alpha1.AnnotationHandoverTo],
		status.Action(id.Annotations[v1alpha1.AnnotationHandoverStep])
	switch step {
	case "":
		step = status.ActionOpen
	case status.ActionOpen, status.ActionFinish, status.ActionCancel:
	default:
		err = fmt.Errorf("annotation %s: %q is unknown: want %s, %s or %s",
			v1alpha1.AnnotationHandoverStep, step, status.ActionOpen, status.ActionFinish,
			status.ActionCancel)
	}
	return to, step, err
}

// handover makes the daemon do the requested step. It records a finished step in the status, so
// that the server of another pod does not repeat it. It returns whether to check again soon,
// because no event announces that the daemon has seen the annotation.
func (r *Reconciler) handover(ctx context.Context, id *v1alpha1.VMIdentity, pod *corev1.Pod) (
	c *metav1.Condition, poll bool, err error) {
	to, step, err := step(id)
	switch {
	// A finished step stays finished. Another one is repeated while it is requested.
	case to == "", err == nil && id.Status.Handover == string(step)+" "+to:
		return settled(id), false, r.request(ctx, id, pod, "")
	case err != nil:
		return handoverCondition(v1alpha1.ReasonInvalid, err.Error()), false,
			r.request(ctx, id, pod, "")
	case pod == nil:
		return handoverCondition(v1alpha1.ReasonHandoverPending,
			"the disk is not served: this goes on when it is"), false, nil
	}
	text, err := json.Marshal(status.Handover{Action: step, LUN: lun, To: to})
	if err != nil {
		return nil, false, err
	}
	asked := string(text)
	if err := r.request(ctx, id, pod, asked); err != nil {
		c, err := failed(handoverCondition, "that the server is asked", err)
		return c, false, err
	}
	s, err := r.Ask(ctx, objects.PagesAddress(pod))
	switch {
	case err != nil:
		// Do not include the error: it contains ports, which differ at each try, and each change of
		// the status would cause another try at once.
		return handoverCondition(v1alpha1.ReasonHandoverPending, fmt.Sprintf("the server in pod "+
			"%s does not answer: let the controller reach http://%s/status", pod.Name,
			objects.PagesAddress(pod))), true, nil
	case s.Handover == nil || s.Handover.Asked != asked:
		return handoverCondition(v1alpha1.ReasonHandoverPending, fmt.Sprintf("the server in pod "+
			"%s is asked to %s the LUN for %s", pod.Name, step, to)), true, nil
	case s.Handover.Error != "":
		return handoverCondition(v1alpha1.ReasonFailed, s.Handover.Error), true, nil
	}
	id.Status.Handover = string(step) + " " + to
	return handed(step, s.Handover.Done), false, nil
}

// request sets the annotation of a pod that requests a step; "": none. An old step could give the
// disk to a machine that had it then.
func (r *Reconciler) request(ctx context.Context, id *v1alpha1.VMIdentity, pod *corev1.Pod,
	asked string) error {
	if pod == nil || pod.Annotations[v1alpha1.AnnotationHandoverRequest] == asked {
		return nil
	}
	err := r.Fresh(ctx, id)
	if err == nil {
		err = objects.Change(ctx, r.Client, pod, func(pod *corev1.Pod) {
			if delete(pod.Annotations, v1alpha1.AnnotationHandoverRequest); asked != "" {
				metav1.SetMetaDataAnnotation(&pod.ObjectMeta, v1alpha1.AnnotationHandoverRequest,
					asked)
			}
		})
	}
	if err != nil {
		return fmt.Errorf("handover by pod %s: %w", pod.Name, err)
	}
	return nil
}

// handed is the condition after a finished step.
func handed(step status.Action, done string) (c *metav1.Condition) {
	switch step {
	case status.ActionFinish:
		c = handoverCondition(v1alpha1.ReasonHandedOver, done)
		c.Status = metav1.ConditionTrue
	case status.ActionCancel:
		c = handoverCondition(v1alpha1.ReasonHandoverCancelled, done)
	default:
		c = handoverCondition(v1alpha1.ReasonHandoverOpen, fmt.Sprintf("%s: set annotation %s to "+
			"%s when the machine has moved, or to %s", done, v1alpha1.AnnotationHandoverStep,
			status.ActionFinish, status.ActionCancel))
	}
	return c
}

// settled is the condition while no step is requested: that of the last finished step, and not of a
// withdrawn one. nil: no change.
func settled(id *v1alpha1.VMIdentity) *metav1.Condition {
	step, to, once := strings.Cut(id.Status.Handover, " ")
	if !once {
		apimeta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionHandedOver)
		return nil
	}
	c := handed(status.Action(step), fmt.Sprintf("the last step was to %s for %s", step, to))
	is := apimeta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionHandedOver)
	if is != nil && is.Reason == c.Reason {
		return nil
	}
	return c
}

func handoverCondition(reason, message string) *metav1.Condition {
	return &metav1.Condition{Type: v1alpha1.ConditionHandedOver, Status: metav1.ConditionFalse,
		Reason: reason, Message: message}
}
