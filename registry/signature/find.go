package signature

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/registry/transport"
)

const (
	// maxRead bounds what is read to look for signatures of one image at one place. Bytes.
	maxRead = 64 << 20
	// maxRefused bounds the reasons that are remembered.
	maxRefused = 1024
	// maxReferrers bounds the entries of an index of referrers.
	maxReferrers = 4096
	// lookTime bounds the search for signatures of one image at one place.
	lookTime = 5 * time.Minute

	annotationSignature = "dev.cosignproject.cosign/signature"
)

// sigTag is the tag of the signatures of an image.
func sigTag(digest string) string { return strings.Replace(digest, ":", "-", 1) + ".sig" }

// looked is the result of the search at one place. Each error completes "its signature ...".
type looked struct {
	refused []error // why the signatures that were read do not count
	left    int     // how many were not read
	bytes   int64   // bytes read for them
	away    error   // why there may be others: the place could not be asked
}

func (l *looked) refuse(err error) {
	if len(l.refused) < maxRefused {
		l.refused = append(l.refused, err)
	}
}

// mayRead counts bytes, and reports whether they may be read.
func (l *looked) mayRead(n int64) bool {
	l.bytes += max(n, 0)
	return l.bytes <= maxRead
}

// look calls visit with the signatures of an image, the newest first, until visit returns nil. Then
// look returns true.
func look(ctx context.Context, at transport.Place, digest string,
	visit func(evidence) error) (found bool, seen looked) {
	ctx, cancel := context.WithTimeoutCause(ctx, lookTime, fmt.Errorf(
		"its registry has not sent the signatures within %s", lookTime))
	defer cancel()
	for _, one := range []func(context.Context, transport.Place, string, *looked,
		func(evidence) error) (bool, error){lookSimple, lookReferrers} {
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

// lookSimple looks at the signatures under the tag.
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
	return visitSimple(ctx, at, m, seen, visit)
}

// visitSimple calls visit with the signatures in a manifest, the newest first.
func visitSimple(ctx context.Context, at transport.Place, m *v1.Manifest, seen *looked,
	visit func(evidence) error) (bool, error) {
	payloads := make(map[v1.Hash][]byte) // most signatures have the same one
	for i := len(m.Layers) - 1; i >= 0; i-- {
		desc := m.Layers[i]
		_, have := payloads[desc.Digest]
		if !have && desc.Size <= maxPayload && !seen.mayRead(desc.Size) {
			seen.left += i + 1
			break
		}
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

// fetched is the error of fetching something that a place should have. The place may have sent
// something wrong.
func fetched(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.As(err, new(*transport.DigestError)) ||
		errors.Is(err, transport.ErrTooLong) {
		return fmt.Errorf("is incomplete: %w", err)
	}
	return &awayError{err}
}

// simpleOf reads the signature of a layer.
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

// lookReferrers looks at manifests that refer to the image. They have bundles, or signatures in the
// form of those under the tag.
func lookReferrers(ctx context.Context, at transport.Place, digest string, seen *looked,
	visit func(evidence) error) (bool, error) {
	text, err := at.Referrers(ctx, digest)
	if err != nil {
		return false, err
	}
	all, err := signaturesIn(text)
	if err != nil {
		seen.refuse(fmt.Errorf("cannot be found: %w", err))
		return false, nil
	}
	for i, desc := range all {
		if !seen.mayRead(0) {
			seen.left += len(all) - i
			break
		}
		found, err := visitReferrer(ctx, at, desc, seen, visit)
		switch {
		case found:
			return true, nil
		case isAway(err):
			return false, err.(*awayError).error
		case err != nil:
			seen.refuse(err)
		}
	}
	return false, nil
}

// signaturesIn returns the entries of an index of referrers that may have signatures, the likely
// ones first: the newest of them, and then those whose annotation says that they state something
// else. So attestations, which are made again and again, displace no signature.
func signaturesIn(text []byte) (all []v1.Descriptor, err error) {
	index, err := transport.ParseIndex(text)
	if err != nil {
		return nil, fmt.Errorf("the list of what refers to the image cannot be read: %w", err)
	}
	if len(index.Manifests) > maxReferrers {
		return nil, fmt.Errorf("%d manifests refer to the image, more than %d",
			len(index.Manifests), maxReferrers)
	}
	var others []v1.Descriptor
	for _, m := range slices.Backward(index.Manifests) {
		// Clients that keep the list themselves write the configuration's type instead of the
		// artifact's.
		switch m.ArtifactType {
		case "", mediaBundle, mediaEmpty, mediaSimple, mediaSignature, string(types.OCIConfigJSON):
		default:
			continue
		}
		if m.Digest.Algorithm != "sha256" {
			continue
		}
		if says := m.Annotations[annotationPredicate]; says == "" || says == predicateSign {
			all = append(all, m)
		} else {
			others = append(others, m)
		}
	}
	return append(all, others...), nil
}

const (
	// mediaEmpty is the type of the configuration of an artifact that has none.
	mediaEmpty = "application/vnd.oci.empty.v1+json"
	// mediaSignature is the type of an artifact with signatures in the form of those under the tag.
	mediaSignature = "application/vnd.dev.cosign.artifact.sig.v1+json"
	// annotationPredicate is the type of a bundle's statement, as its signer writes outside of it.
	annotationPredicate = "dev.sigstore.bundle.predicateType"
)

// visitReferrer shows the signatures in a manifest, if it has any.
func visitReferrer(ctx context.Context, at transport.Place, desc v1.Descriptor, seen *looked,
	visit func(evidence) error) (bool, error) {
	text, err := at.Manifest(ctx, desc.Digest.String())
	if err != nil {
		return false, fetched(err)
	}
	_ = seen.mayRead(int64(len(text)))
	m, err := transport.ParseManifest(text)
	if err != nil {
		return false, fmt.Errorf("cannot be read: %w", err)
	}
	if len(m.Layers) == 0 {
		return false, nil // something else that refers to the image
	}
	layer := m.Layers[0]
	switch {
	case layer.MediaType == mediaSimple:
		found, err := visitSimple(ctx, at, m, seen, visit)
		if err != nil {
			err = &awayError{err}
		}
		return found, err
	case layer.MediaType != mediaBundle:
		return false, nil
	case layer.Size > maxBundle:
		return false, fmt.Errorf("is a bundle of %d bytes, more than %d", layer.Size, maxBundle)
	case !seen.mayRead(layer.Size):
		seen.left++
		return false, nil
	}
	if text, err = at.Small(ctx, layer, maxBundle); err != nil {
		return false, fetched(err)
	}
	err = visit(evidence{Format: FormatBundle, Bundle: text})
	return err == nil, err
}
