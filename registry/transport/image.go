package transport

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/registry/internal/bounded"
)

const (
	// MaxManifest bounds a manifest, an index and a configuration, in bytes. Registries accept at
	// most 4 MiB.
	MaxManifest = 4 << 20
	maxLayers   = 1024
	// maxNested is how many nested indexes may lead to a manifest.
	maxNested = 3
)

// ErrTooLong says that an answer is longer than a manifest may be.
var ErrTooLong = fmt.Errorf("a manifest of more than %d bytes", MaxManifest)

// manifestTypes are the accepted media types.
var manifestTypes = []string{string(types.OCIManifestSchema1), string(types.OCIImageIndex),
	string(types.DockerManifestSchema2), string(types.DockerManifestList)}

// Source has the parts of an image: it is a repository or something local.
type Source interface {
	// Manifest returns the manifest with a digest, or the reference's if the digest is "".
	Manifest(ctx context.Context, digest string) (content []byte, mediaType string, err error)
	// Blob returns a blob that a manifest names. It reads nothing yet.
	Blob(desc v1.Descriptor) (*Blob, error)
	// Admit asks the client's Gate whether the image that the reference names may be read. content
	// is that of its manifest, or of its index. Until then Blob fails. proof is that of an earlier
	// Admission, or nil. Named calls Admit.
	Admit(ctx context.Context, content, proof []byte) (Admission, error)
	// Origin names all places whose bytes the source may return: each registry and mirror that it
	// may ask, and how well the connection is protected; or one directory or file.
	Origin() string
	Close() error
}

// Source opens the image that the reference names. If a registry sends no parts, a blob may be
// fetched as a whole into spoolDir; "": it never is.
func (c *Client) Source(ref Reference, spoolDir string) (Source, error) {
	src, err := c.source(ref, spoolDir)
	if err != nil || c.opt.Gate == nil {
		return src, err
	}
	return &gated{Source: src, gate: c.opt.Gate, ref: ref}, nil
}

// source opens an image without a gate.
func (c *Client) source(ref Reference, spoolDir string) (Source, error) {
	switch {
	case ref.web != nil:
		return c.openAddress(ref, spoolDir)
	case ref.oci != "":
		return openLayout(ref)
	case ref.file != "":
		return openArchive(ref)
	}
	endpoints, err := c.endpoints(ref.remote.Context(), true)
	if err != nil {
		return nil, err
	}
	return &repository{ref: ref, endpoints: endpoints, spoolDir: spoolDir}, nil
}

// repository is a source in a registry.
type repository struct {
	ref Reference

	mu sync.Mutex
	// endpoints is guarded by mu. The first one that answers becomes the first to ask. One that
	// sent wrong content becomes the last.
	endpoints []*endpoint
	// shunned is guarded by mu: until when an endpoint that brought too little is asked last.
	shunned map[*endpoint]time.Time

	spoolDir string // for blobs that are fetched as a whole; "": none are
	// spools are guarded by mu: by digest, also ended ones; nil: the blob cannot be kept
	spools map[string]*spool
	closed bool           // guarded by mu
	work   sync.WaitGroup // goroutines that fetch a blob as a whole
}

// shunTime is how long an endpoint that brought too little is asked after the others.
const shunTime = 2 * time.Minute

func (r *repository) Close() error {
	r.endSpools()
	return nil
}

func (r *repository) Admit(context.Context, []byte, []byte) (Admission, error) {
	return Admission{}, nil
}

func (r *repository) Blob(desc v1.Descriptor) (*Blob, error) {
	return &Blob{Desc: desc, from: r}, nil
}

func (r *repository) Origin() string {
	var all []string
	for _, e := range r.order() {
		all = append(all, fmt.Sprintf("%t %s", e.secure, e.repo.Name()))
	}
	slices.Sort(all) // the order changes while they are asked
	return strings.Join(all, "\n")
}

// order is the present order of the endpoints.
func (r *repository) order() []*endpoint {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, now := slices.Clone(r.endpoints), time.Now()
	if len(r.shunned) == 0 {
		return all
	}
	last := func(e *endpoint) int {
		if now.Before(r.shunned[e]) {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b *endpoint) int { return last(a) - last(b) })
	return all
}

// shun makes an endpoint that brought too little the last to ask for a while.
func (r *repository) shun(e, next *endpoint, why error) {
	r.mu.Lock()
	before := time.Now().Before(r.shunned[e])
	if r.shunned == nil {
		r.shunned = make(map[*endpoint]time.Time)
	}
	r.shunned[e] = time.Now().Add(shunTime)
	r.mu.Unlock()
	if !before {
		e.client.opt.Warn(fmt.Sprintf("%s: %v; %s is asked before it for %s",
			e.repo.RegistryStr(), why, next.repo.RegistryStr(), shunTime))
	}
}

// move makes an endpoint the first to ask, or the last.
func (r *repository) move(e *endpoint, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	others := slices.DeleteFunc(slices.Clone(r.endpoints), func(o *endpoint) bool { return o == e })
	if r.endpoints = append(others, e); first {
		r.endpoints = append([]*endpoint{e}, others...)
	}
}

// distrust makes an endpoint that sent wrong content the last to ask.
func (r *repository) distrust(e *endpoint) {
	if all := r.order(); len(all) > 1 && all[0] == e {
		e.client.opt.Warn(fmt.Sprintf("%s has sent wrong content: %s is asked first from now on",
			e.repo.RegistryStr(), all[1].repo.RegistryStr()))
		r.move(e, false)
	}
}

func (r *repository) Manifest(ctx context.Context, digest string) ([]byte, string, error) {
	name := cmp.Or(digest, r.ref.remote.Identifier())
	var failed error // of the registry, which knows more than a mirror
	all := r.order()
	for i, e := range all {
		content, mediaType, err := e.manifest(ctx, name)
		if err == nil && strings.HasPrefix(name, "sha256:") {
			err = CheckDigest(content, name)
		}
		if err == nil && e.mirror && !json.Valid(content) { // a tag: nothing else shows that
			err = errors.New("its answer is no manifest")
		}
		if err == nil {
			r.move(e, true)
			return content, mediaType, nil
		}
		if failed == nil || !e.mirror {
			failed = err
		}
		if ctx.Err() != nil {
			break
		}
		if i+1 < len(all) {
			e.client.opt.Warn(fmt.Sprintf("%s: %v; %s is asked", e.repo.RegistryStr(), err,
				all[i+1].repo.RegistryStr()))
		}
	}
	if notFound(failed) {
		return nil, "", fmt.Errorf("%s does not exist: %w; check the name, and the tag or digest",
			r.ref, failed)
	}
	return nil, "", fmt.Errorf("%s: %w", r.ref, failed)
}

func (e *endpoint) manifest(ctx context.Context, name string) (content []byte, mediaType string,
	err error) {
	err = e.retry(ctx, func() error {
		content, mediaType, err = e.text(ctx, pullScopes(e), manifestRequest(name))
		return err
	})
	return content, mediaType, err
}

func manifestRequest(name string) request {
	return request{method: http.MethodGet, path: "manifests/" + name,
		header: http.Header{"Accept": {strings.Join(manifestTypes, ", ")}},
		accept: []int{http.StatusOK}}
}

// text reads an answer of at most MaxManifest bytes.
func (e *endpoint) text(ctx context.Context, scopes []string,
	r request) (content []byte, mediaType string, err error) {
	ctx, cancel := e.within(ctx)
	defer cancel()
	res, err := e.once(ctx, scopes, r)
	if err != nil {
		return nil, "", err
	}
	defer res.Body.Close()
	if res.ContentLength > MaxManifest {
		return nil, "", permanent(fmt.Errorf("%w: %d bytes", ErrTooLong, res.ContentLength))
	}
	content, err = bounded.Read(res.Body, MaxManifest)
	if len(content) > MaxManifest {
		return nil, "", permanent(ErrTooLong)
	}
	if err != nil {
		return nil, "", fmt.Errorf("reading the manifest: %w", err)
	}
	mediaType, _, _ = strings.Cut(res.Header.Get("Content-Type"), ";")
	return content, mediaType, nil
}

func DigestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// CheckDigest compares content with its digest; "": any content. For wrong content the error is a
// *DigestError.
func CheckDigest(content []byte, want string) error {
	if got := DigestOf(content); want != "" && got != want {
		return &DigestError{Want: want, Got: got}
	}
	return nil
}

// DigestIn is the digest of what was written to a SHA-256.
func DigestIn(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// Image is an image whose manifest was read. All other parts are known by their digests.
type Image struct {
	Source   Source
	Ref      Reference
	Digest   string // of the manifest
	Named    string // digest of what Ref names: of the manifest, or of an index that leads to it
	Manifest *v1.Manifest
	Admitted Admission
}

// Resolve reads the manifest of a reference. If it is a list for several platforms, Resolve takes
// this machine's.
func (c *Client) Resolve(ctx context.Context, ref Reference) (*Image, error) {
	src, err := c.Source(ref, "")
	if err != nil {
		return nil, err
	}
	r, err := Resolve(ctx, src, ref)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	return r, nil
}

func Resolve(ctx context.Context, src Source, ref Reference) (*Image, error) {
	content, mediaType, admitted, err := Named(ctx, src, ref)
	if err != nil {
		return nil, err
	}
	digest := DigestOf(content)
	named := digest
	for range maxNested {
		switch kind := ManifestKind(content, mediaType); {
		case kind.IsIndex():
			desc, err := OfPlatform(content, ref)
			if err != nil {
				return nil, err
			}
			digest = desc.Digest.String()
			content, mediaType, err = src.Manifest(ctx, digest)
			if err == nil {
				err = CheckDigest(content, digest)
			}
			if err != nil {
				return nil, err
			}
		case kind.IsImage():
			m, err := ParseManifest(content)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", ref, err)
			}
			return &Image{Source: src, Ref: ref, Digest: digest, Named: named,
				Manifest: m, Admitted: admitted}, nil
		default:
			return nil, fmt.Errorf("%s is not a container image: its manifest is of the type %q",
				ref, kind)
		}
	}
	return nil, fmt.Errorf("%s: an index within an index within an index", ref)
}

// ManifestKind returns the type that a manifest has in its content. Registries and layouts may be
// wrong about it.
func ManifestKind(content []byte, mediaType string) types.MediaType {
	var says struct {
		MediaType string            `json:"mediaType"`
		Manifests []json.RawMessage `json:"manifests"`
		Layers    []json.RawMessage `json:"layers"`
	}
	if bounded.Check(content) != nil || json.Unmarshal(content, &says) != nil {
		return types.MediaType(mediaType)
	}
	switch {
	case says.MediaType != "":
		return types.MediaType(says.MediaType)
	case says.Manifests != nil && says.Layers == nil:
		return types.OCIImageIndex
	case says.Layers != nil && says.Manifests == nil:
		return types.OCIManifestSchema1
	}
	return types.MediaType(mediaType)
}

// ParseManifest parses a manifest from an untrusted source, and bounds it.
func ParseManifest(content []byte) (*v1.Manifest, error) {
	err := bounded.Check(content)
	var m *v1.Manifest
	if err == nil {
		m, err = v1.ParseManifest(bytes.NewReader(content))
	}
	if err != nil {
		return nil, fmt.Errorf("its manifest cannot be read: %w", err)
	}
	if len(m.Layers) > maxLayers {
		return nil, fmt.Errorf("it has %d layers, more than %d", len(m.Layers), maxLayers)
	}
	for _, l := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if l.Size < 0 {
			return nil, fmt.Errorf("the blob %s has a size of %d bytes", l.Digest, l.Size)
		}
		if l.Digest.Algorithm != "sha256" {
			return nil, fmt.Errorf(
				"the digest %q is of an algorithm that is not supported: sha256 is", l.Digest)
		}
	}
	return m, nil
}

// Small reads and verifies a blob that is known to be small.
func (r *Image) Small(ctx context.Context, desc v1.Descriptor, limit int64) ([]byte, error) {
	var content *bytes.Buffer
	err := r.Read(ctx, desc, limit, func(in io.Reader) error {
		content = bytes.NewBuffer(make([]byte, 0, max(desc.Size, 0)+bytes.MinRead))
		_, err := content.ReadFrom(in)
		return err
	})
	if err != nil {
		return nil, err
	}
	return content.Bytes(), nil
}

// Read calls read with a verified blob. If the content was wrong, it calls read once more with the
// content of another endpoint.
func (r *Image) Read(ctx context.Context, desc v1.Descriptor, limit int64,
	read func(in io.Reader) error) error {
	if desc.Size > limit {
		return fmt.Errorf("the blob %s has %d bytes, more than %d", desc.Digest, desc.Size, limit)
	}
	b, err := r.Source.Blob(desc)
	if err != nil {
		return err
	}
	for try := 1; ; try++ {
		if err := b.Read(ctx, read); !b.Again(err, try) {
			return err
		}
	}
}
