package transport

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"strings"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Gate decides which images may be read.
type Gate interface {
	// Admit says why an image may be read, or returns an error. So far, only the content of what
	// its reference names was read.
	Admit(ctx context.Context, a Asked) (Admission, error)
}

// Asked is an image that a Gate is asked about.
type Asked struct {
	Ref Reference
	// Content is what the reference names: a manifest, or an index of manifests. It has the digest
	// of everything else that is read of the image, directly or by way of other digests.
	Content []byte
	Proof   []byte  // of an earlier Admission; nil: there is none
	Places  []Place // see PlacesOf
}

// Admission says why an image may be read. The zero value: there is no Gate.
type Admission struct {
	Key string // the fingerprint of the key that has signed it; "": no signature was needed
	// Proof lets Admit decide again without the registry. nil: there is none.
	Proof []byte
}

// Place is a place beside an image: in its repository, at a registry or a mirror, or in its OCI
// layout. errors.Is(err, fs.ErrNotExist) says that something does not exist there.
type Place interface {
	// Tagged returns the manifest or the index that a tag names.
	Tagged(ctx context.Context, tag string) ([]byte, error)
	// Manifest returns the manifest with a digest.
	Manifest(ctx context.Context, digest string) ([]byte, error)
	// Referrers returns the index of the manifests that refer to the one with a digest. If there
	// are several pages, it is the first one.
	Referrers(ctx context.Context, digest string) ([]byte, error)
	// Small reads and verifies a blob of at most limit bytes.
	Small(ctx context.Context, desc v1.Descriptor, limit int64) ([]byte, error)
	// Mirror reports whether the place may lack what the image's own registry has.
	Mirror() bool
}

// PlacesOf returns the places beside the image that a source has open: mirrors that are asked
// before the registry, and the registry, or its layout. An archive of docker has none.
func PlacesOf(src Source) (all []Place) {
	if g, ok := src.(*gated); ok {
		src = g.Source
	}
	switch src := src.(type) {
	case *repository:
		for _, e := range src.order() {
			one := &repository{ref: src.ref, endpoints: []*endpoint{e}}
			all = append(all, &remotePlace{one, e})
			if !e.mirror { // the registry itself: no later endpoint knows more
				break
			}
		}
	case *layout:
		all = append(all, layoutPlace{src})
	}
	return all
}

// absent is an error that says that something does not exist.
type absent struct{ error }

func (a absent) Is(target error) bool { return target == fs.ErrNotExist }
func (a absent) Unwrap() error        { return a.error }

// remotePlace is a repository at one endpoint.
type remotePlace struct {
	*repository
	at *endpoint
}

func (p *remotePlace) Mirror() bool { return p.at.mirror }

func (p *remotePlace) Tagged(ctx context.Context, tag string) ([]byte, error) {
	content, _, err := p.at.manifest(ctx, tag)
	if notFound(err) {
		err = absent{err}
	}
	return content, err
}

func (p *remotePlace) Manifest(ctx context.Context, digest string) ([]byte, error) {
	content, err := p.Tagged(ctx, digest)
	if err == nil {
		err = CheckDigest(content, digest)
	}
	return content, err
}

// Referrers asks by the API. If there is none, it reads the tag that stands for it (OCI
// distribution specification, "Unavailable Referrers API").
func (p *remotePlace) Referrers(ctx context.Context, digest string) (content []byte, err error) {
	kind := ""
	err = p.at.retry(ctx, func() error {
		content, kind, err = p.at.text(ctx, pullScopes(p.at), request{method: http.MethodGet,
			path:   "referrers/" + digest,
			header: http.Header{"Accept": {string(types.OCIImageIndex)}},
			accept: []int{http.StatusOK}})
		if lacksReferrers(statusOf(err)) {
			return nil
		}
		return err
	})
	if err == nil && kind != string(types.OCIImageIndex) {
		return p.Tagged(ctx, strings.Replace(digest, ":", "-", 1))
	}
	return content, err
}

// lacksReferrers reports whether a registry without the API may answer with that status.
func lacksReferrers(status int) bool {
	switch status {
	case http.StatusNotFound, http.StatusBadRequest, http.StatusMethodNotAllowed,
		http.StatusNotAcceptable:
		return true
	}
	return false
}

func (p *remotePlace) Small(ctx context.Context, desc v1.Descriptor, limit int64) ([]byte, error) {
	content, err := (&Image{Source: p.repository}).Small(ctx, desc, limit)
	if notFound(err) {
		err = absent{err}
	}
	return content, err
}

// layoutPlace is the layout with an image. A tag is the name of another image there.
type layoutPlace struct{ *layout }

func (layoutPlace) Mirror() bool { return false }

func (p layoutPlace) Tagged(ctx context.Context, tag string) ([]byte, error) {
	other := *p.layout
	other.tag = tag
	content, _, err := other.Manifest(ctx, "")
	return content, err
}

func (p layoutPlace) Manifest(ctx context.Context, digest string) ([]byte, error) {
	content, _, err := p.layout.Manifest(ctx, digest)
	if err == nil {
		err = CheckDigest(content, digest)
	}
	return content, err
}

func (p layoutPlace) Referrers(ctx context.Context, digest string) ([]byte, error) {
	return p.Tagged(ctx, strings.Replace(digest, ":", "-", 1))
}

func (p layoutPlace) Small(ctx context.Context, desc v1.Descriptor, limit int64) ([]byte, error) {
	return (&Image{Source: p.layout}).Small(ctx, desc, limit)
}

// gated is a source that returns nothing of an image before it was admitted.
type gated struct {
	Source
	gate     Gate
	ref      Reference
	admitted atomic.Bool
}

func (g *gated) Admit(ctx context.Context, content, proof []byte) (Admission, error) {
	a, err := g.gate.Admit(ctx, Asked{Ref: g.ref, Content: content, Proof: proof,
		Places: PlacesOf(g.Source)})
	if err == nil {
		g.admitted.Store(true)
	}
	return a, err
}

func (g *gated) Blob(desc v1.Descriptor) (*Blob, error) {
	if !g.admitted.Load() { // a bug: the reader has not called Named
		return nil, fmt.Errorf("%s: nobody has asked whether it may be read", g.ref)
	}
	return g.Source.Blob(desc)
}

// Named reads what a reference names, a manifest or an index of manifests, and asks whether the
// image may be read. Every reader of an image begins here.
func Named(ctx context.Context, src Source, ref Reference) (content []byte, mediaType string,
	a Admission, err error) {
	digest, _ := ref.Digest()
	content, mediaType, err = src.Manifest(ctx, digest)
	if err == nil {
		err = CheckDigest(content, digest)
	}
	if err == nil {
		a, err = src.Admit(ctx, content, nil)
	}
	return content, mediaType, a, err
}
