package fill

import (
	"context"
	"slices"
	"strings"
	"time"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/registry/signature"
)

// signed returns a VMImage with the keys that its image must be signed by: its own that the policy
// of the namespace admits, or those of the policy if it names none. A state says why the image may
// not be fetched.
func (r *Reconciler) signed(ctx context.Context, image *v1alpha1.VMImage) (*v1alpha1.VMImage,
	*state, error) {
	if r.Options.Keys == nil {
		return image, nil, nil
	}
	keys, reason, message, err := r.Options.Keys(ctx, image.Namespace, image.Spec.Image)
	if err != nil {
		return nil, nil, err
	}
	if reason != "" {
		return nil, is(reason, "%s", message).after(time.Minute), nil
	}
	if len(keys) == 0 {
		return image, nil, nil
	}
	var own []signature.Key
	if len(image.Spec.Keys) > 0 {
		own, err = signature.ParseKeys([]byte(strings.Join(image.Spec.Keys, "\n")))
		if err != nil {
			return nil, is(v1alpha1.ReasonInvalid, "the keys of the VMImage: %v", err), nil
		}
	}
	with := image.DeepCopy()
	with.Spec.Keys = nil
	for _, k := range keys {
		if own != nil && !slices.ContainsFunc(own, func(o signature.Key) bool {
			return o.Fingerprint == k.Fingerprint
		}) {
			continue
		}
		text, err := k.PEM()
		if err != nil {
			return nil, nil, err
		}
		with.Spec.Keys = append(with.Spec.Keys, text)
	}
	if len(with.Spec.Keys) == 0 {
		return nil, is(v1alpha1.ReasonNotSigned, "none of the keys of the VMImage is one that "+
			"the policy of the namespace asks for: name one of those, or none").
			after(time.Minute), nil
	}
	return with, nil, nil
}
