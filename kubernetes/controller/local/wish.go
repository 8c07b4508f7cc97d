package local

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// MustWait returns why a pod has to wait for a move, or "". When the answer changes, the identity's
// status or annotations change, too. live reads nodes, which are in no cache.
func MustWait(ctx context.Context, live client.Reader, id *v1alpha1.VMIdentity,
	pod objects.Asking) (message string, err error) {
	if id.Spec.Type != v1alpha1.Local {
		return "", nil
	}
	wants, asked := pod.Spec.NodeSelector[corev1.LabelHostname],
		id.Annotations[v1alpha1.AnnotationMoveTo]
	if wants != "" && asked != "" && wants != asked {
		return fmt.Sprintf("it has to run on node %s, and the annotation %s of VMIdentity %s "+
			"keeps the disk on %s: change one of them", wants, v1alpha1.AnnotationMoveTo, id.Name,
			asked), nil
	}
	to, err := target(ctx, live, id, []objects.Asking{pod})
	if to == "" || err != nil {
		return "", err
	}
	return fmt.Sprintf("its disk is moved to node %s first", to), nil
}

// target returns the node that a disk should move to, or "" if it is in the right place. A disk
// without a volume is made where it is needed.
func target(ctx context.Context, live client.Reader, id *v1alpha1.VMIdentity,
	waiting []objects.Asking) (string, error) {
	if !meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionBound) {
		return "", nil
	}
	to := wish(id, waiting)
	if to == "" || to == id.Status.NodeName {
		return "", nil
	}
	if id.Annotations[v1alpha1.AnnotationMoveTo] != "" || id.Status.NodeName == "" {
		return to, nil
	}
	// The label of a node may differ from its name.
	node, err := findNode(ctx, live, id.Status.NodeName)
	if err != nil || node != nil && node.Labels[corev1.LabelHostname] == to {
		return "", err
	}
	return to, nil
}

// findNode returns a node, or nil if there is none.
func findNode(ctx context.Context, live client.Reader, name string) (*corev1.Node, error) {
	return objects.Find[corev1.Node](ctx, live, "node", client.ObjectKey{Name: name})
}

// wish returns the node on which a disk should be: that of its identity, or else of the first
// waiting pod.
func wish(id *v1alpha1.VMIdentity, waiting []objects.Asking) string {
	if to := id.Annotations[v1alpha1.AnnotationMoveTo]; to != "" {
		return to
	}
	for _, p := range waiting {
		if to := p.Spec.NodeSelector[corev1.LabelHostname]; to != "" {
			return to
		}
	}
	return ""
}

// waiting returns those pods that wait for an identity at their gate, oldest first.
func waiting(pods []corev1.Pod, identity string) []objects.Asking {
	return slices.DeleteFunc(objects.AskingFor(pods, identity),
		func(p objects.Asking) bool { return !p.Waits() })
}
