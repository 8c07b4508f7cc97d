package claim

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Reason tells a program why a claim cannot become a disk.
type Reason string

// The reasons.
const (
	NotBound    Reason = "NotBound"          // no volume yet, or not any more: try again later
	OtherVolume Reason = "OtherVolume"       // the volume belongs to another claim
	InUse       Reason = "InUse"             // another pod may write to it: try again when it ends
	NoDirect    Reason = "UnsupportedDriver" // QEMU cannot use the volume by itself
	Invalid     Reason = "Invalid"           // the claim, the volume or the options are wrong
)

// Error is the reason why a claim cannot become a disk.
type Error struct {
	Reason    Reason
	Namespace string
	Claim     string
	Driver    string // with NoDirect: the kind of the volume, or its CSI driver
	Problem   string // what is wrong and what to do, without the claim's name
}

func (e *Error) Error() string {
	return fmt.Sprintf("claim %s/%s: %s", e.Namespace, e.Claim, e.Problem)
}

func refuse(c *corev1.PersistentVolumeClaim, reason Reason, format string, args ...any) *Error {
	return &Error{Reason: reason, Namespace: c.Namespace, Claim: c.Name,
		Problem: fmt.Sprintf(format, args...)}
}
