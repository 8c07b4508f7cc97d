// Package hydration finds out when a disk no longer needs its image. It asks the pages of the pod
// that serves the disk, less and less often, and records the answer for good. A hydrated disk is
// never asked about again.
package hydration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// Reconciler asks pods and writes condition Hydrated.
type Reconciler struct {
	objects.Kit
	// Ask asks the pages of a pod how far its disk is.
	Ask func(ctx context.Context, address string) (Answer, error)

	aside objects.Aside[Answer]
	mu    sync.Mutex
	pace  map[types.NamespacedName]pace // guarded by mu
}

// Answer is how far a disk is.
type Answer int

// The answers.
const (
	// Copying says that the disk still needs its image.
	Copying Answer = iota
	// Complete says that the disk no longer needs its image.
	Complete
	// Kept says that the disk always needs its image, by its copy mode.
	Kept
)

// errNotYet says that a pod serves no disk yet.
var errNotYet = errors.New("it has no disk yet")

// pace is how often a pod is asked.
type pace struct {
	pod      types.UID
	after    time.Duration // until the next time
	next     time.Time     // which is then
	failures int           // without an answer, one after the other
}

// The shortest and longest time between two questions.
const (
	first = 2 * time.Second
	last  = time.Minute
)

// tooMany is after how many failures people are told. As the pace slows down, they take two
// minutes.
const tooMany = 7

// Reconcile asks about one identity, if it is due.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before := &v1alpha1.VMIdentity{}
	err := r.Get(ctx, req.NamespacedName, before)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if err != nil || !before.DeletionTimestamp.IsZero() {
		r.forget(req.NamespacedName)
		return ctrl.Result{}, nil
	}
	// The claim comes before the pod: one that still has the pod is the claim that the pod has.
	claim, err := objects.Find[corev1.PersistentVolumeClaim](ctx, r.Client, "claim",
		client.ObjectKey{Namespace: before.Namespace, Name: v1alpha1.ClaimName(before.Name)})
	if err != nil {
		return ctrl.Result{}, err
	}
	pod, err := objects.Server(ctx, r.Client, before)
	if err != nil {
		return ctrl.Result{}, err
	}
	if known, err := r.known(ctx, before, claim, pod); known || err != nil {
		r.forget(req.NamespacedName)
		return ctrl.Result{}, err
	}
	if pod == nil || claim == nil {
		r.forget(req.NamespacedName)
		return ctrl.Result{}, nil
	}
	if wait := r.due(req.NamespacedName, pod.UID); wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	answer, known, asked := r.aside.Ask(ctx, req.NamespacedName, pod.UID,
		func(ctx context.Context) (Answer, error) {
			return r.Ask(ctx, objects.PagesAddress(pod))
		})
	if !known {
		return ctrl.Result{}, nil // the answer makes another request
	}
	failures, wait := r.asked(req.NamespacedName, asked)
	c, known := condition(pod, answer, asked, failures)
	if !known {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	id := before.DeepCopy()
	if c.Status == metav1.ConditionTrue {
		if runs, err := r.runs(ctx, pod); !runs || err != nil {
			return ctrl.Result{RequeueAfter: wait}, err
		}
		id.Status.HydratedClaim = claim.UID
		c.Message = message(id, pod)
	}
	objects.SetCondition(&id.Status.Conditions, id.Generation, c)
	if err := r.Report(ctx, before, id); err != nil {
		return ctrl.Result{}, err // the pod is asked again when that is due
	}
	if c.Status == metav1.ConditionTrue || c.Reason == v1alpha1.ReasonImageKept {
		r.forget(req.NamespacedName)
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: wait}, nil
}

// known reports whether there is nothing to ask about: the claim of the identity was hydrated. It
// withdraws the condition if that was another claim, as after one was restored from a backup.
func (r *Reconciler) known(ctx context.Context, before *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim, pod *corev1.Pod) (bool, error) {
	c := meta.FindStatusCondition(before.Status.Conditions, v1alpha1.ConditionHydrated)
	hydrated := claim != nil && before.Status.HydratedClaim == claim.UID
	if !hydrated && before.Status.HydratedClaim == "" &&
		(c == nil || c.Status != metav1.ConditionTrue) {
		return false, nil
	}
	id := before.DeepCopy()
	if !hydrated {
		id.Status.HydratedClaim = ""
		meta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionHydrated)
	} else {
		objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
			Type: v1alpha1.ConditionHydrated, Status: metav1.ConditionTrue,
			Reason: v1alpha1.ReasonHydrated, Message: message(id, pod)})
	}
	// The change makes another request.
	return true, objects.PatchStatus(ctx, r.Client, before, id)
}

// runs reports whether a pod has not ended, according to the API server.
func (r *Reconciler) runs(ctx context.Context, pod *corev1.Pod) (bool, error) {
	now, err := objects.Find[corev1.Pod](ctx, r.Live, "pod", client.ObjectKeyFromObject(pod))
	return now != nil && now.UID == pod.UID && !objects.Finished(now), err
}

// message says whether the image of a hydrated disk may go. The pod is the one that serves the
// disk, or nil.
func message(id *v1alpha1.VMIdentity, pod *corev1.Pod) string {
	const done = "the disk needs its image no more"
	if id.Spec.Attachment == v1alpha1.Service && pod != nil && mounts(pod) {
		return done + "; keep the image until its server was started again without it, which " +
			"happens when no pod uses the disk"
	}
	if id.Spec.Attachment != v1alpha1.Service && id.Spec.Type == v1alpha1.Local {
		return done + ", but its pods mount it, because a local disk may move: keep the image"
	}
	return done + ", and new pods start without it"
}

// mounts reports whether a pod has an image as a volume.
func mounts(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.Image != nil
	})
}

// condition is the condition for an answer. false: there is nothing that people need to know.
func condition(p *corev1.Pod, answer Answer, asked error, failures int) (metav1.Condition, bool) {
	c := metav1.Condition{Type: v1alpha1.ConditionHydrated, Status: metav1.ConditionFalse}
	switch {
	case errors.Is(asked, errNotYet):
		return c, false
	case asked != nil && failures < tooMany:
		return c, false
	case asked != nil:
		// The error contains times and ports, which differ at each try.
		c.Status, c.Reason = metav1.ConditionUnknown, v1alpha1.ReasonUnknown
		c.Message = fmt.Sprintf("pod %s does not say how far its disk is: let the controller "+
			"reach http://%s/status, for example by a NetworkPolicy", p.Name,
			objects.PagesAddress(p))
	case answer == Complete:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonHydrated
		c.Message = "the disk needs its image no more"
	case answer == Kept:
		c.Reason = v1alpha1.ReasonImageKept
		c.Message = fmt.Sprintf("the copy mode of pod %s copies only what is used: the disk "+
			"always needs its image", p.Name)
	default:
		c.Reason = v1alpha1.ReasonHydrating
		c.Message = fmt.Sprintf("the image is copied while the machine runs: `kubectl "+
			"port-forward %s %d` shows how far it is", p.Name, objects.PagesPort(&p.Spec))
	}
	return c, true
}

// due returns how long to wait until a pod may be asked. A pod that was never asked may be asked at
// once.
func (r *Reconciler) due(id types.NamespacedName, pod types.UID) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pace == nil {
		r.pace = make(map[types.NamespacedName]pace)
	}
	p, known := r.pace[id]
	if !known || p.pod != pod {
		r.pace[id] = pace{pod: pod, after: first, next: time.Now()}
		return 0
	}
	return time.Until(p.next)
}

// asked notes that a pod was asked. It returns how often that has failed so far, and when the pod
// is due again.
func (r *Reconciler) asked(id types.NamespacedName, err error) (int, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pace[id]
	p.failures++
	if err == nil || errors.Is(err, errNotYet) {
		p.failures = 0
	}
	wait := p.after
	p.after = min(2*p.after, last)
	p.next = time.Now().Add(wait)
	r.pace[id] = p
	return p.failures, wait
}

func (r *Reconciler) forget(id types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pace, id)
	r.aside.Forget(id)
}

// Setup adds the controller to a manager, whose cache has objects.IndexIdentity of pods.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{Kit: kit, Ask: ask}
	return r.For(mgr, "hydration", &v1alpha1.VMIdentity{}).
		WatchesRawSource(r.aside.Source()).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		// A claim may be another one now.
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Complete(objects.Reconciler(r))
}

// ask reads the page /status of a pod.
func ask(ctx context.Context, address string) (Answer, error) {
	page, err := objects.ReadStatus(ctx, address)
	if err != nil {
		return 0, err
	}
	return answer(page.LUNs)
}

// answer is the answer about the disk with the most left to copy.
func answer(luns []status.LUN) (Answer, error) {
	if len(luns) == 0 {
		return 0, errNotYet
	}
	all := Complete
	for _, lun := range luns {
		switch {
		case !lun.Ready:
			return 0, errNotYet
		case lun.Copy != nil && lun.Copy.Complete:
		case lun.CopyMode != string(libvirt.CopyClone):
			all = Kept
		default:
			return Copying, nil
		}
	}
	return all, nil
}
