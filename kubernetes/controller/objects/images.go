package objects

import (
	"context"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Images says which images may be used.
type Images interface {
	// Hold returns why the image of an identity may not be used now, or "". When the answer
	// changes, so does the identity's status.
	Hold(ctx context.Context, id *v1alpha1.VMIdentity) (reason, message string, err error)
}

// Held asks images about an identity. nil: all may be used.
func Held(ctx context.Context, images Images, id *v1alpha1.VMIdentity) (reason, message string,
	err error) {
	if images == nil {
		return "", "", nil
	}
	return images.Hold(ctx, id)
}
