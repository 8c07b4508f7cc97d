package objects

import (
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/tools/events"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// eventTypes are the reasons of conditions that are also sent as an event, with the event's type.
// Good news is only in the conditions, because an event is a request to the API server.
var eventTypes = map[string]string{
	v1alpha1.ReasonSetMissing:      corev1.EventTypeWarning,
	v1alpha1.ReasonSetDiffers:      corev1.EventTypeWarning,
	v1alpha1.ReasonClassMissing:    corev1.EventTypeWarning,
	v1alpha1.ReasonClaimMissing:    corev1.EventTypeWarning,
	v1alpha1.ReasonClaimLost:       corev1.EventTypeWarning,
	v1alpha1.ReasonClaimForeign:    corev1.EventTypeWarning,
	v1alpha1.ReasonSecretForeign:   corev1.EventTypeWarning,
	v1alpha1.ReasonSecretMissing:   corev1.EventTypeWarning,
	v1alpha1.ReasonQuotaExceeded:   corev1.EventTypeWarning,
	v1alpha1.ReasonResizeRefused:   corev1.EventTypeWarning,
	v1alpha1.ReasonPopulationError: corev1.EventTypeWarning,
	v1alpha1.ReasonSourceMissing:   corev1.EventTypeWarning,
	v1alpha1.ReasonNotCloneable:    corev1.EventTypeWarning,
	v1alpha1.ReasonImageDiffers:    corev1.EventTypeWarning,
	v1alpha1.ReasonUnschedulable:   corev1.EventTypeWarning,
	v1alpha1.ReasonUnknown:         corev1.EventTypeWarning,
	v1alpha1.ReasonFailed:          corev1.EventTypeWarning,
	v1alpha1.ReasonInvalid:         corev1.EventTypeWarning,
	v1alpha1.ReasonSourceGone:      corev1.EventTypeWarning,
	v1alpha1.ReasonTargetFailed:    corev1.EventTypeWarning,
	v1alpha1.ReasonExportFailed:    corev1.EventTypeWarning,
	v1alpha1.ReasonFollowed:        corev1.EventTypeNormal,
	v1alpha1.ReasonWentBack:        corev1.EventTypeWarning,
	v1alpha1.ReasonTagMissing:      corev1.EventTypeWarning,
	v1alpha1.ReasonNotSigned:       corev1.EventTypeWarning,
	v1alpha1.ReasonUnverified:      corev1.EventTypeWarning,
	v1alpha1.ReasonDiskWaits:       corev1.EventTypeWarning,
	v1alpha1.ReasonDiskFull:        corev1.EventTypeWarning,
	v1alpha1.ReasonDiskFailing:     corev1.EventTypeWarning,
	v1alpha1.ReasonDiskFailed:      corev1.EventTypeWarning,
	v1alpha1.ReasonDiskFenced:      corev1.EventTypeWarning,
	v1alpha1.ReasonDiskRecovered:   corev1.EventTypeNormal,
	v1alpha1.ReasonExported:        corev1.EventTypeNormal,
	v1alpha1.ReasonMoved:           corev1.EventTypeNormal,
	v1alpha1.ReasonResizing:        corev1.EventTypeNormal,
	v1alpha1.ReasonHydrated:        corev1.EventTypeNormal,
	v1alpha1.ReasonUUIDInUse:       corev1.EventTypeNormal,
	v1alpha1.ReasonDeleting:        corev1.EventTypeNormal,
}

// EventType is the type of the event for a reason, or "" if there is none.
func EventType(reason string) string { return eventTypes[reason] }

// action is the activity of the controller, which every event has to name.
const action = "Reconcile"

// maxNote is the longest note of an event that the API server takes. Bytes.
const maxNote = 1024

// Tell sends an event for each condition whose status or reason changed, if kind has one for the
// reason.
func (k Kit) Tell(before, after Reported, kind func(reason string) string) {
	told := make(map[string]bool) // several conditions may have one reason
	for _, c := range after.GetConditions() {
		old := meta.FindStatusCondition(before.GetConditions(), c.Type)
		changed := old == nil || old.Status != c.Status || old.Reason != c.Reason
		if changed && !told[c.Reason] {
			told[c.Reason] = true
			EventAs(kind, k.Events, after, nil, c.Reason, c.Message)
		}
	}
}

// Event sends an event for a reason, if the reason has one. related is the other object of the
// event, or nil.
func Event(r events.EventRecorder, object, related runtime.Object, reason, message string) {
	EventAs(EventType, r, object, related, reason, message)
}

// EventAs is Event for a controller with events for other reasons. kind is used like EventType.
func EventAs(kind func(reason string) string, r events.EventRecorder, object,
	related runtime.Object, reason, message string) {
	of := kind(reason)
	if of == "" {
		return
	}
	if len(message) > maxNote {
		message = strings.ToValidUTF8(message[:maxNote-3], "") + "..."
	}
	r.Eventf(object, related, of, reason, action, "%s", message)
}

// Once remembers for an hour what was reported or done, so that it is not repeated. Nothing else
// depends on it: after a restart, it is empty. The zero value is ready.
type Once struct {
	made sync.Once
	seen *cache.Expiring
}

// First reports whether something is new, and remembers it.
func (o *Once) First(what any) bool {
	known := o.Known(what)
	if !known {
		o.seen.Set(what, nil, time.Hour)
	}
	return !known
}

// Known reports whether something was remembered already.
func (o *Once) Known(what any) bool {
	o.made.Do(func() { o.seen = cache.NewExpiring() })
	_, known := o.seen.Get(what)
	return known
}
