package controllertest

import (
	"context"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Refusing is an objects.Images: the reason why no image may be used. "": all may.
type Refusing string

// Hold says so of every identity.
func (r *Refusing) Hold(context.Context, *v1alpha1.VMIdentity) (reason, message string, err error) {
	if *r == "" {
		return "", "", nil
	}
	return string(*r), "the image has no signature", nil
}
