// Package trouble writes what is wrong with a disk that is in use into condition Troubled: its
// machine hangs or gets errors, and `kubectl describe` should say so. It asks the page /status of
// the pod that serves the disk once a minute. A disk that never was in trouble has no condition, so
// that thousands of disks cost no writes.
package trouble

import (
	"context"
	"fmt"
	"slices"
	"strings"
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
	"kubevirt.io/disk/status"
)

// pace is how often a pod is asked.
const pace = time.Minute

// maxText is how much a condition says of what a pod has told. Bytes.
const maxText = 512

// Reconciler asks pods and writes condition Troubled.
type Reconciler struct {
	objects.Kit
	// Ask reads the page /status at an address.
	Ask func(ctx context.Context, address string) (*status.Status, error)

	aside objects.Aside[*status.Status]
	mu    sync.Mutex
	asked map[types.NamespacedName]asked // guarded by mu
}

// asked is when a pod may be asked again.
type asked struct {
	pod  types.UID
	next time.Time
}

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
	pod, err := objects.Server(ctx, r.Client, before)
	if err != nil {
		return ctrl.Result{}, err
	}
	if pod == nil {
		r.forget(req.NamespacedName)
		return ctrl.Result{}, r.tell(ctx, before, metav1.Condition{Status: metav1.ConditionFalse,
			Reason: v1alpha1.ReasonNotInUse, Message: "no pod serves the disk"})
	}
	if wait := r.due(req.NamespacedName, pod.UID); wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	page, known, err := r.aside.Ask(ctx, req.NamespacedName, pod.UID,
		func(ctx context.Context) (*status.Status, error) {
			return r.Ask(ctx, objects.PagesAddress(pod))
		})
	if !known {
		return ctrl.Result{}, nil // the answer makes another request
	}
	r.note(req.NamespacedName, pod.UID)
	if err != nil { // what was known last stays
		return ctrl.Result{RequeueAfter: pace}, nil
	}
	if c, known := condition(page.LUNs); known {
		err = r.tell(ctx, before, c)
	}
	return ctrl.Result{RequeueAfter: pace}, err
}

// tell writes a condition whose status or reason is new. What else a pod says differs each time.
func (r *Reconciler) tell(ctx context.Context, before *v1alpha1.VMIdentity,
	c metav1.Condition) error {
	c.Type = v1alpha1.ConditionTroubled
	old := meta.FindStatusCondition(before.Status.Conditions, c.Type)
	if old == nil && c.Status != metav1.ConditionTrue ||
		old != nil && old.Status == c.Status && old.Reason == c.Reason {
		return nil
	}
	id := before.DeepCopy()
	objects.SetCondition(&id.Status.Conditions, id.Generation, c)
	return r.Report(ctx, before, id)
}

// reasons are those of the states in which a disk is in trouble.
var reasons = map[status.DiskState]string{
	status.DiskFailed:  v1alpha1.ReasonDiskFailed,
	status.DiskWaiting: v1alpha1.ReasonDiskWaits,
	status.DiskNoSpace: v1alpha1.ReasonDiskFull,
	status.DiskFailing: v1alpha1.ReasonDiskFailing,
	status.DiskFenced:  v1alpha1.ReasonDiskFenced,
}

// condition is the condition for what a pod's disks are doing: the worst of them counts. known is
// false while one is still to be opened: nobody knows whether it works then.
func condition(luns []status.LUN) (c metav1.Condition, known bool) {
	for _, state := range status.DiskStates { // the worst ones first
		i := slices.IndexFunc(luns, func(l status.LUN) bool { return l.State == state })
		if i < 0 || reasons[state] == "" {
			continue
		}
		l := &luns[i]
		text := fmt.Sprintf("LUN %d is %s since %s: %s", l.LUN, state.Words(),
			l.Since.UTC().Format(time.RFC3339), l.Reason)
		if l.WhatToDo != "" {
			text += ": " + l.WhatToDo
		}
		return metav1.Condition{Status: metav1.ConditionTrue, Reason: reasons[state],
			Message: strings.ToValidUTF8(text[:min(len(text), maxText)], "")}, true
	}
	if len(luns) == 0 || slices.ContainsFunc(luns, func(l status.LUN) bool {
		return l.State == status.DiskStarting
	}) {
		return c, false
	}
	return metav1.Condition{Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonDiskRecovered,
		Message: "the disk works again"}, true
}

// due returns how long to wait until a pod may be asked.
func (r *Reconciler) due(id types.NamespacedName, pod types.UID) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.asked[id]; a.pod == pod {
		return time.Until(a.next)
	}
	return 0
}

// note notes that a pod was asked.
func (r *Reconciler) note(id types.NamespacedName, pod types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asked == nil {
		r.asked = map[types.NamespacedName]asked{}
	}
	r.asked[id] = asked{pod: pod, next: time.Now().Add(pace)}
}

func (r *Reconciler) forget(id types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.asked, id)
	r.aside.Forget(id)
}

// Setup adds the controller to a manager, whose cache has objects.IndexIdentity of pods.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{Kit: kit, Ask: objects.ReadStatus}
	return r.For(mgr, "trouble", &v1alpha1.VMIdentity{}).
		WatchesRawSource(r.aside.Source()).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Complete(objects.Reconciler(r))
}
