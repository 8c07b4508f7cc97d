package fill

import (
	"context"
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
	with := image.DeepCopy()
	if len(image.Spec.Keys) > 0 {
		own, err := fingerprints(image.Spec.Keys)
		if err != nil {
			return nil, is(v1alpha1.ReasonInvalid, "the keys of the VMImage: %v", err), nil
		}
		keys = common(keys, own)
		if len(keys) == 0 {
			return nil, is(v1alpha1.ReasonNotSigned, "none of the keys of the VMImage is one that "+
				"the policy of the namespace asks for: name one of those, or none").
				after(time.Minute), nil
		}
	}
	with.Spec.Keys = keys
	return with, nil, nil
}

func fingerprints(texts []string) (map[string]bool, error) {
	keys, err := signature.ParseKeys([]byte(strings.Join(texts, "\n")))
	all := make(map[string]bool, len(keys))
	for _, k := range keys {
		all[k.Fingerprint] = true
	}
	return all, err
}

// common returns the keys (PEM) that have one of the fingerprints.
func common(keys []string, own map[string]bool) (both []string) {
	for _, text := range keys {
		prints, err := fingerprints([]string{text})
		for print := range prints {
			if err == nil && own[print] {
				both = append(both, text)
			}
		}
	}
	return both
}
