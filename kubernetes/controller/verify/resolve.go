package verify

import (
	"context"
	"errors"
	"net/http"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// Found is what a tag names.
type Found struct {
	Digest string
	// Reason and Message say why it is not known, or must not be used. "": not so.
	Reason, Message string
}

// Resolve asks a registry what a reference with a tag names, and whether the policy of a namespace
// admits that. Without Policies, all is admitted.
func (v *Verifier) Resolve(ctx context.Context, namespace string, ref transport.Reference) (Found,
	error) {
	a := asked{ref: ref}
	if v.Options.Policies != "" {
		var err error
		if a, err = v.askOf(ctx, namespace, ref); err != nil || a.reason != "" {
			return Found{Reason: a.reason, Message: a.message}, err
		}
	}
	content, _, err := v.named(ctx, a)
	var no *signature.RefusedError
	var status *transport.StatusError
	switch {
	case errors.As(err, &no):
		return Found{Reason: v1alpha1.ReasonNotSigned, Message: short(err)}, nil
	case errors.As(err, &status) && status.Status == http.StatusNotFound:
		return Found{Reason: v1alpha1.ReasonTagMissing, Message: "there is no such tag"}, nil
	case err != nil:
		return Found{Reason: v1alpha1.ReasonUnverified, Message: short(err)}, nil
	}
	if !transport.ManifestKind(content, "").IsIndex() {
		if _, err := transport.ParseManifest(content); err != nil {
			return Found{Reason: v1alpha1.ReasonInvalid, Message: short(err)}, nil
		}
	}
	return Found{Digest: transport.DigestOf(content)}, nil
}
