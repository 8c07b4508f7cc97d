// Package state asks the pod that serves a disk for the disk's state, and writes two conditions:
// Hydrated, which is final, when the disk no longer needs its image, and Troubled, with the reason
// why its machine hangs or gets errors. A disk that never had trouble has no condition, so that
// thousands of disks cost no writes.
package state

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/status"
)

// Reconciler asks pods and writes the conditions Hydrated and Troubled.
type Reconciler struct {
	objects.Kit
	// Ask reads the page /status at an address.
	Ask func(ctx context.Context, address string) (*status.Status, error)

	mu   sync.Mutex
	pace map[types.NamespacedName]pace // guarded by mu
}

// pace is how often a pod is asked.
type pace struct {
	pod      types.UID
	after    time.Duration // until the next time
	next     time.Time     // the next time
	failures int           // without an answer in between
}

// The shortest and longest time between two questions.
const (
	first = 2 * time.Second
	last  = time.Minute
)

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
	// Read the claim before the pod: if the claim still has the pod, the pod has this claim.
	claim, err := objects.Claim(ctx, r.Client, before)
	if err != nil {
		return ctrl.Result{}, err
	}
	pod, err := objects.Server(ctx, r.Client, before)
	if err != nil {
		return ctrl.Result{}, err
	}
	id := before.DeepCopy()
	hydrated := known(id, claim, pod)
	if pod == nil {
		r.forget(req.NamespacedName)
		setTroubled(id, metav1.Condition{Status: metav1.ConditionFalse,
			Reason: v1alpha1.ReasonNotInUse, Message: "no pod serves the disk"})
		return ctrl.Result{}, r.Report(ctx, before, id)
	}
	wait := r.due(req.NamespacedName, pod.UID)
	if wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, r.Report(ctx, before, id)
	}
	page, err := r.Ask(ctx, objects.PagesAddress(pod))
	failures, wait := r.asked(req.NamespacedName, err)
	if err != nil {
		page = &status.Status{} // the last known state stays
	}
	if c, known := troubled(page.LUNs); known {
		setTroubled(id, c)
	}
	c, known := isHydrated(pod, page.LUNs, failures)
	if known && claim != nil && !hydrated {
		if c.Status == metav1.ConditionTrue {
			if same, err := r.answered(ctx, pod); !same || err != nil {
				return ctrl.Result{RequeueAfter: wait}, err
			}
			id.Status.HydratedClaim = claim.UID
			c.Message = message(id, pod)
		}
		objects.SetCondition(&id.Status.Conditions, id.Generation, c)
	}
	return ctrl.Result{RequeueAfter: wait}, r.Report(ctx, before, id)
}

// answered reports whether the answer came from this pod: according to the API server, it has not
// ended, and still has the address. Otherwise another pod may have the address now.
func (r *Reconciler) answered(ctx context.Context, pod *corev1.Pod) (bool, error) {
	now, err := objects.Find[corev1.Pod](ctx, r.Live, "pod", client.ObjectKeyFromObject(pod))
	return now != nil && now.UID == pod.UID && !objects.Finished(now) &&
		now.Status.PodIP == pod.Status.PodIP, err
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

// asked records a question to a pod. It returns how often that has failed so far, and the time
// until the next question.
func (r *Reconciler) asked(id types.NamespacedName, err error) (int, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pace[id]
	p.failures++
	if err == nil {
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
}

// Setup adds the controller to a manager, whose cache has objects.IndexIdentity of pods.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{Kit: kit, Ask: objects.ReadStatus}
	return r.ForAsking(mgr, "state", &v1alpha1.VMIdentity{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		// The claim may have been replaced.
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Complete(objects.Reconciler(r))
}
