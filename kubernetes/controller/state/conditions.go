package state

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// tooMany is the number of failures after which people are told. With the growing pauses, they take
// two minutes.
const tooMany = 7

// known reports whether the claim of an identity is known to be hydrated: this is not asked again.
// It withdraws the condition if it was about another claim, as after a restore from a backup.
func known(id *v1alpha1.VMIdentity, claim *corev1.PersistentVolumeClaim, pod *corev1.Pod) bool {
	if claim != nil && id.Status.HydratedClaim == claim.UID {
		objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
			Type: v1alpha1.ConditionHydrated, Status: metav1.ConditionTrue,
			Reason: v1alpha1.ReasonHydrated, Message: message(id, pod)})
		return true
	}
	if id.Status.HydratedClaim != "" ||
		meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionHydrated) {
		id.Status.HydratedClaim = ""
		meta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionHydrated)
	}
	return false
}

// isHydrated is condition Hydrated for the state of a pod's disks: the one with the most left to
// copy counts. failures is how often the pod has not answered, one after the other. false: people
// need not know anything.
func isHydrated(pod *corev1.Pod, luns []status.LUN, failures int) (metav1.Condition, bool) {
	c := metav1.Condition{Type: v1alpha1.ConditionHydrated, Status: metav1.ConditionFalse}
	if failures >= tooMany {
		// Do not include the error: it contains times and ports, which differ at each try.
		c.Status, c.Reason = metav1.ConditionUnknown, v1alpha1.ReasonUnknown
		c.Message = fmt.Sprintf("pod %s does not say how far its disk is: let the controller "+
			"reach http://%s/status, for example by a NetworkPolicy", pod.Name,
			objects.PagesAddress(pod))
		return c, true
	}
	if len(luns) == 0 || slices.ContainsFunc(luns, func(l status.LUN) bool { return !l.Ready }) {
		return c, false
	}
	c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonHydrated
	for _, lun := range luns {
		switch {
		case lun.Copy != nil && lun.Copy.Complete:
		case lun.CopyMode == string(libvirt.CopyClone):
			c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonHydrating
			c.Message = fmt.Sprintf("the image is copied while the machine runs: `kubectl "+
				"port-forward %s %d` shows how far it is", pod.Name, objects.PagesPort(&pod.Spec))
			return c, true
		default:
			c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonImageKept
			c.Message = fmt.Sprintf("the copy mode of pod %s copies only what is used: the disk "+
				"always needs its image", pod.Name)
		}
	}
	return c, true
}

// message tells whether the image of a hydrated disk may be removed. The pod is the one that serves
// the disk, or nil.
func message(id *v1alpha1.VMIdentity, pod *corev1.Pod) string {
	const done = "the disk no longer needs its image"
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

// reasons are those of the states in which a disk is in trouble.
var reasons = map[status.DiskState]string{
	status.DiskFailed:  v1alpha1.ReasonDiskFailed,
	status.DiskWaiting: v1alpha1.ReasonDiskWaits,
	status.DiskNoSpace: v1alpha1.ReasonDiskFull,
	status.DiskFailing: v1alpha1.ReasonDiskFailing,
	status.DiskFenced:  v1alpha1.ReasonDiskFenced,
}

// maxText limits the text from a pod in a condition. Bytes.
const maxText = 512

// troubled is condition Troubled for the state of a pod's disks: the worst one counts. false: it is
// unknown, because one is not open yet.
func troubled(luns []status.LUN) (c metav1.Condition, known bool) {
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

// setTroubled sets condition Troubled if its status or reason is new. The rest of a pod's answer
// differs each time.
func setTroubled(id *v1alpha1.VMIdentity, c metav1.Condition) {
	c.Type = v1alpha1.ConditionTroubled
	old := meta.FindStatusCondition(id.Status.Conditions, c.Type)
	if old == nil && c.Status != metav1.ConditionTrue ||
		old != nil && old.Status == c.Status && old.Reason == c.Reason {
		return
	}
	objects.SetCondition(&id.Status.Conditions, id.Generation, c)
}
