package signature

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/transport"
)

const (
	// maxLooked is how many signatures of each format are looked at, the newest ones.
	maxLooked = 64
	// maxReferrers bounds the entries of an index of referrers.
	maxReferrers = 4096
	// lookTime bounds how long signatures of one image are looked for at one place.
	lookTime = 5 * time.Minute

	annotationSignature = "dev.cosignproject.cosign/signature"
)

// sigTag is the tag of the signatures of an image.
func sigTag(digest string) string { return strings.Replace(digest, ":", "-", 1) + ".sig" }

// looked is what was found at one place. Each error completes "its signature ...".
type looked struct {
	refused []error // why the signatures that were looked at do not count
	left    int     // how many were not looked at
	away    error   // why there may be others: the place could not be asked
}

func (l *looked) refuse(err error) { l.refused = append(l.refused, err) }

// look shows the signatures of an image to visit, the newest ones first, until that returns nil.
// Then it returns true.
func look(ctx context.Context, at transport.Place, digest string,
	visit func(evidence) error) (found bool, seen looked) {
	ctx, cancel := context.WithTimeoutCause(ctx, lookTime, fmt.Errorf(
		"its registry has not sent the signatures within %s", lookTime))
	defer cancel()
	for _, one := range []func(context.Context, transport.Place, string, *looked,
		func(evidence) error) (bool, error){lookSimple, lookBundles} {
		found, err := one(ctx, at, digest, &seen, visit)
		if found {
			return true, seen
		}
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist):
		case errors.Is(err, transport.ErrTooLong):
			seen.refuse(fmt.Errorf("cannot be read: %w", err))
		default:
			seen.away = errors.Join(seen.away, err)
		}
	}
	return false, seen
}

// lookSimple looks at signatures under the tag.
func lookSimple(ctx context.Context, at transport.Place, digest string, seen *looked,
	visit func(evidence) error) (bool, error) {
	text, err := at.Tagged(ctx, sigTag(digest))
	if err != nil {
		return false, err
	}
	m, err := transport.ParseManifest(text)
	if err != nil {
		seen.refuse(fmt.Errorf("cannot be read: %w", err))
		return false, nil
	}
	payloads := make(map[v1.Hash][]byte) // mostly it is the same one
	for i := len(m.Layers) - 1; i >= 0; i-- {
		if len(m.Layers)-i > maxLooked {
			seen.left += i + 1
			break
		}
		desc := m.Layers[i]
		e, err := simpleOf(ctx, at, desc, payloads)
		if err == nil {
			err = visit(e)
		}
		if err == nil {
			return true, nil
		}
		if isAway(err) {
			return false, err.(*awayError).error
		}
		seen.refuse(err)
	}
	return false, nil
}

// awayError is an error of a place that could not be asked.
type awayError struct{ error }

func isAway(err error) bool {
	_, ok := err.(*awayError)
	return ok
}

// fetched is the error of something that a place should have. It may have sent something wrong.
func fetched(err error) error {
	var wrong *transport.DigestError
	if errors.Is(err, fs.ErrNotExist) || errors.As(err, &wrong) ||
		errors.Is(err, transport.ErrTooLong) {
		return fmt.Errorf("is incomplete: %w", err)
	}
	return &awayError{err}
}

// simpleOf reads the signature that a layer has.
func simpleOf(ctx context.Context, at transport.Place, desc v1.Descriptor,
	payloads map[v1.Hash][]byte) (e evidence, err error) {
	if desc.MediaType != mediaSimple {
		return e, fmt.Errorf("is of the type %q: only %q is supported",
			shortened(string(desc.MediaType)), mediaSimple)
	}
	sig, err := signatureOf(desc.Annotations[annotationSignature])
	if err != nil {
		return e, err
	}
	if desc.Size > maxPayload {
		return e, fmt.Errorf("has a payload of %d bytes, more than %d", desc.Size, maxPayload)
	}
	text, ok := payloads[desc.Digest]
	if !ok {
		if text, err = at.Small(ctx, desc, maxPayload); err != nil {
			return e, fetched(err)
		}
		payloads[desc.Digest] = text
	}
	return evidence{Format: FormatSimple, Payload: text, Signature: sig}, nil
}

// lookBundles looks at bundles in manifests that refer to the image.
func lookBundles(ctx context.Context, at transport.Place, digest string, seen *looked,
	visit func(evidence) error) (bool, error) {
	text, err := at.Referrers(ctx, digest)
	if err != nil {
		return false, err
	}
	all, err := bundlesIn(text)
	if err != nil {
		seen.refuse(fmt.Errorf("cannot be found: %w", err))
		return false, nil
	}
	for i := len(all) - 1; i >= 0; i-- {
		if len(all)-i > maxLooked {
			seen.left += i + 1
			break
		}
		text, err := bundleOf(ctx, at, all[i])
		if err == nil && text == nil {
			continue // something else that refers to the image
		}
		if err == nil {
			err = visit(evidence{Format: FormatBundle, Bundle: text})
		}
		if err == nil {
			return true, nil
		}
		if isAway(err) {
			return false, err.(*awayError).error
		}
		seen.refuse(err)
	}
	return false, nil
}

// bundlesIn are the entries of an index of referrers that may have a bundle.
func bundlesIn(text []byte) (all []v1.Descriptor, err error) {
	err = bounded.Check(text)
	var index *v1.IndexManifest
	if err == nil {
		index, err = v1.ParseIndexManifest(bytes.NewReader(text))
	}
	if err != nil {
		return nil, fmt.Errorf("the list of what refers to the image cannot be read: %w", err)
	}
	if len(index.Manifests) > maxReferrers {
		return nil, fmt.Errorf("%d manifests refer to the image, more than %d",
			len(index.Manifests), maxReferrers)
	}
	for _, m := range index.Manifests {
		// Clients that keep the list themselves take the type of the configuration for the
		// artifact's.
		switch m.ArtifactType {
		case "", mediaBundle, mediaEmpty:
			if m.Digest.Algorithm == "sha256" {
				all = append(all, m)
			}
		}
	}
	return all, nil
}

// mediaEmpty is the type of the configuration of an artifact that has none.
const mediaEmpty = "application/vnd.oci.empty.v1+json"

// bundleOf reads the bundle in a manifest. nil: there is none.
func bundleOf(ctx context.Context, at transport.Place, desc v1.Descriptor) ([]byte, error) {
	text, err := at.Manifest(ctx, desc.Digest.String())
	if err != nil {
		return nil, fetched(err)
	}
	m, err := transport.ParseManifest(text)
	if err != nil {
		return nil, fmt.Errorf("cannot be read: %w", err)
	}
	if len(m.Layers) == 0 || m.Layers[0].MediaType != mediaBundle {
		return nil, nil
	}
	layer := m.Layers[0]
	if layer.Size > maxBundle {
		return nil, fmt.Errorf("is a bundle of %d bytes, more than %d", layer.Size, maxBundle)
	}
	if text, err = at.Small(ctx, layer, maxBundle); err != nil {
		return nil, fetched(err)
	}
	return text, nil
}
