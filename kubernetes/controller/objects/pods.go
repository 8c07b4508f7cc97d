package objects

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Finished reports whether the containers of a pod have ended and will not start again.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Gated reports whether a pod is held by the gate of this product.
func Gated(pod *corev1.Pod) bool { return GateIndex(pod) >= 0 }

// GateIndex is the index of the gate in the pod's list, or -1.
func GateIndex(pod *corev1.Pod) int {
	return slices.IndexFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == v1alpha1.Gate
	})
}

// IndexIdentity is the index of pods by the identity that they ask for.
const IndexIdentity = v1alpha1.Group + "/pod-identity"

// ByIdentity returns the keys of a pod in IndexIdentity.
func ByIdentity(pod client.Object) []string {
	if name := pod.GetLabels()[v1alpha1.LabelIdentity]; name != "" {
		return []string{name}
	}
	return nil
}

// ByLabel requests the identity that a label of an object names, if the object has the label.
func ByLabel(label string) handler.MapFunc {
	return func(_ context.Context, o client.Object) []reconcile.Request {
		name := o.GetLabels()[label]
		if name == "" {
			return nil
		}
		return []reconcile.Request{{NamespacedName: client.ObjectKey{
			Namespace: o.GetNamespace(), Name: name}}}
	}
}

// Anew reports whether an update brings another spec, and not only another status. An object that
// was deleted and made again while the watch was lost arrives as an update, too. It has another
// UID, and may have the same generation.
func Anew(before, after client.Object) bool {
	return before.GetUID() != after.GetUID() || before.GetGeneration() != after.GetGeneration()
}

// The shortest and longest time before a failed attempt is repeated. It is repeated within a
// minute, because people look at what they have just repaired.
const (
	firstTry = 10 * time.Millisecond
	lastTry  = time.Minute
	// afterConflict is how long the cache gets to receive somebody else's write.
	afterConflict = 50 * time.Millisecond
)

// Backoff says when a controller repeats a failed attempt.
func Backoff[Request comparable]() workqueue.TypedRateLimiter[Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[Request](firstTry, lastTry)
}
