package objects

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Finished reports whether the containers of a pod have ended and will not start again.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Asking is a pod that asks for the disk of an identity.
type Asking struct {
	*corev1.Pod
	// Number is the number of the disk in the pod: see admission.Disk.
	Number int
	// SetName is the VMIdentitySet that the pod names; "": the pod serves the disk, or moves it.
	SetName string
	// Gate is the index of the gate that holds the pod until it has the disk; -1: none.
	Gate int
}

// Asks returns how a pod asks for an identity.
func Asks(pod *corev1.Pod, identity string) Asking {
	n := Number(pod, identity)
	gate := v1alpha1.Numbered(v1alpha1.Gate, n)
	return Asking{pod, n, admission.SetName(pod, n), slices.IndexFunc(pod.Spec.SchedulingGates,
		func(g corev1.PodSchedulingGate) bool { return g.Name == gate })}
}

// AskingFor returns those pods that ask for an identity and have not ended, oldest first. Pods that
// serve the disk or move it do not ask.
func AskingFor(pods []corev1.Pod, identity string) (all []Asking) {
	for i := range pods {
		if p := Asks(&pods[i], identity); p.SetName != "" && !Finished(p.Pod) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b Asking) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Waits reports whether the pod is at its gate.
func (a Asking) Waits() bool { return a.Gate >= 0 && a.DeletionTimestamp == nil }

// Gated reports whether a pod is held by the gate of an identity.
func Gated(pod *corev1.Pod, identity string) bool { return Asks(pod, identity).Gate >= 0 }

// Number is the number that a disk of an identity has in a pod, by the labels of the pod. It is 0
// if the pod does not have the disk.
func Number(pod client.Object, identity string) int {
	return max(0, slices.Index(identities(pod), identity))
}

// identities are the identities in the labels of an object, by the numbers of the disks.
func identities(o client.Object) []string {
	all := []string{o.GetLabels()[v1alpha1.LabelIdentity]}
	if _, several := o.GetLabels()[v1alpha1.LabelSeveral]; several {
		for n := 1; n < v1alpha1.MaxDisks; n++ {
			all = append(all, o.GetLabels()[v1alpha1.Numbered(v1alpha1.LabelIdentity, n)])
		}
	}
	return all
}

// IndexIdentity is the index of pods by the identities that they ask for.
const IndexIdentity = v1alpha1.Group + "/pod-identity"

// ByIdentity returns the keys of a pod in IndexIdentity.
func ByIdentity(pod client.Object) []string {
	return slices.DeleteFunc(identities(pod), func(name string) bool { return name == "" })
}

// PodsOf returns the pods of an identity, from the cache or from the API server, which has no
// index.
func PodsOf(ctx context.Context, from client.Reader, identity metav1.Object) ([]corev1.Pod, error) {
	var first, several corev1.PodList
	in := client.InNamespace(identity.GetNamespace())
	for list, labels := range map[*corev1.PodList]client.ListOption{
		&first:   client.MatchingLabels{v1alpha1.LabelIdentity: identity.GetName()},
		&several: client.HasLabels{v1alpha1.LabelSeveral},
	} {
		if err := from.List(ctx, list, in, labels); err != nil {
			return nil, fmt.Errorf("pods: %w", err)
		}
	}
	return append(first.Items, slices.DeleteFunc(several.Items, func(p corev1.Pod) bool {
		return Number(&p, identity.GetName()) == 0
	})...), nil
}

// PodsWith returns the pods of an identity, and other pods that may write to its claim. It reads
// all pods of the namespace.
func PodsWith(ctx context.Context, live client.Reader, identity metav1.Object) ([]corev1.Pod,
	error) {
	var all corev1.PodList
	if err := live.List(ctx, &all, client.InNamespace(identity.GetNamespace())); err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	name := identity.GetName()
	return slices.DeleteFunc(all.Items, func(p corev1.Pod) bool {
		return !slices.Contains(ByIdentity(&p), name) && !Writes(&p, v1alpha1.ClaimName(name))
	}), nil
}

// User returns a running pod with the disk of an identity, or "". The pods are those of PodsOf or
// PodsWith. A pod at its gate does not use the disk yet.
func User(pods []corev1.Pod, identity metav1.Object) string {
	for i := range pods {
		if !Finished(&pods[i]) && !Gated(&pods[i], identity.GetName()) {
			return pods[i].Name
		}
	}
	return ""
}

// Identities requests the identities that a pod asks for.
func Identities(_ context.Context, pod client.Object) (all []reconcile.Request) {
	for _, name := range ByIdentity(pod) {
		all = append(all, reconcile.Request{NamespacedName: client.ObjectKey{
			Namespace: pod.GetNamespace(), Name: name}})
	}
	return all
}

// ByLabel requests the identity in a label of an object, if the object has the label.
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

// Unschedulable is the condition of a pod with the scheduler's reason for finding no node, or nil.
func Unschedulable(pod *corev1.Pod) *corev1.PodCondition {
	for i, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse &&
			c.Reason == corev1.PodReasonUnschedulable {
			return &pod.Status.Conditions[i]
		}
	}
	return nil
}

// Anew reports whether an update has a new spec, and not only a new status. An object that was
// deleted and made again while the watch was lost arrives as an update, too. It has another UID,
// and may have the same generation.
func Anew(before, after client.Object) bool {
	return before.GetUID() != after.GetUID() || before.GetGeneration() != after.GetGeneration()
}

// NewSpec ignores events in which only the status of an object has changed.
func NewSpec() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return Anew(e.ObjectOld, e.ObjectNew)
	}}
}

// The shortest and longest time between a failed attempt and the next. It is at most a minute,
// because people look at what they have just repaired.
const (
	firstTry = 10 * time.Millisecond
	lastTry  = time.Minute
	// afterConflict is how long to wait for the cache to receive another client's write.
	afterConflict = 50 * time.Millisecond
	// asking is how many pods may be asked at once, each for at most pageTimeout. In a minute, more
	// than a thousand pods may fail to answer.
	asking = 128
)

// working are the options of a controller that handles several objects at once. 0: one.
func working(concurrency int) controller.Options {
	return controller.Options{MaxConcurrentReconciles: concurrency,
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](
			firstTry, lastTry)}
}

// Reconciler wraps r for a manager. A conflict is then no failure: another client was faster, and
// the cache will have its change in a moment.
func Reconciler(r reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result,
		error) {
		result, err := r.Reconcile(ctx, req)
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: afterConflict}, nil
		}
		return result, err
	})
}

// Writes reports whether a pod may write to a claim. The claim of a generic ephemeral volume is
// named after the pod and the volume.
func Writes(pod *corev1.Pod, claim string) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		c := v.PersistentVolumeClaim
		return c != nil && c.ClaimName == claim && !c.ReadOnly ||
			v.Ephemeral != nil && pod.Name+"-"+v.Name == claim
	})
}

// Server is the pod that serves the disk of an identity and has an address, or nil. from is a cache
// with IndexIdentity.
func Server(ctx context.Context, from client.Reader, id *v1alpha1.VMIdentity) (*corev1.Pod, error) {
	var pods corev1.PodList
	if err := from.List(ctx, &pods, client.InNamespace(id.Namespace),
		client.MatchingFields{IndexIdentity: id.Name}); err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		// Anybody can give a pod the label. A pod with the claim is trusted: it could also write
		// into the claim.
		if !Finished(p) && p.Status.PodIP != "" && DiskContainer(&p.Spec) != nil &&
			Writes(p, v1alpha1.ClaimName(id.Name)) {
			return p, nil
		}
	}
	return nil, nil
}
