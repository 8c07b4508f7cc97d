package transport

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// webSource is a file at an address, as an image of one layer: the file itself. So it is read,
// cached, verified and kept like any layer that is no archive. Its manifest is made here, from the
// name, the size and the digest of the file.
type webSource struct {
	*repository // with one endpoint
	file        *webFile
	learned     *learned
	sum512      string // SHA-512 of the file, in hexadecimal; "": unknown
}

// unknownDigest stands for the digest of a file until all of it was read.
var unknownDigest = v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("0", 64)}

const (
	// titleAnnotation is the name of a file (image-spec, annotations.md).
	titleAnnotation = "org.opencontainers.image.title"
	mediaFile       = "application/octet-stream"
	mediaEmpty      = "application/vnd.oci.empty.v1+json"
	emptyJSON       = "{}"
)

func (c *Client) openAddress(ref Reference, spoolDir string) (*webSource, error) {
	e, err := c.webEndpoint(ref.web)
	if err != nil {
		return nil, err
	}
	e.web.known = ref.web.digest != "" || c.opt.Checksums != ""
	return &webSource{repository: &repository{ref: ref, endpoints: []*endpoint{e},
		spoolDir: spoolDir}, file: e.web, learned: new(learned)}, nil
}

// Manifest makes a manifest. If the digest of the file is unknown, and the server is trusted, the
// first complete content decides the digest.
func (w *webSource) Manifest(ctx context.Context, _ string) ([]byte, string, error) {
	desc, err := w.describe(ctx)
	if err != nil && strings.Contains(w.file.file(), ":") { // a colon as before a tag
		err = fmt.Errorf("%w; if it is an image in a registry, leave out %q", err,
			w.file.url.Scheme+"://")
	}
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", w.ref, err)
	}
	empty, _ := v1.NewHash(DigestOf([]byte(emptyJSON)))
	content, err := json.Marshal(v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: mediaEmpty, Size: int64(len(emptyJSON)), Digest: empty},
		Layers: []v1.Descriptor{desc}})
	return content, string(types.OCIManifestSchema1), err
}

// describe finds out the digest and the size of the file.
func (w *webSource) describe(ctx context.Context) (desc v1.Descriptor, err error) {
	desc = v1.Descriptor{MediaType: mediaFile,
		Annotations: map[string]string{titleAnnotation: w.file.file()}}
	if desc.Digest, err = w.said(ctx); err != nil {
		return desc, err
	}
	if desc.Size, err = w.size(ctx); err != nil {
		return desc, err
	}
	switch {
	case desc.Size < 0:
		return desc, fmt.Errorf("%s does not say how long the file is: fetch it with another "+
			"program, such as curl, and name the file to convert, push or serve", w.file.url.Host)
	case desc.Digest == unknownDigest && w.sum512 != "" && w.spoolDir != "":
		return w.translate(ctx, desc)
	}
	return desc, nil
}

// said returns the digest of the file from the options or the address. It may be unknown.
func (w *webSource) said(ctx context.Context) (digest v1.Hash, err error) {
	e, a, hex := w.endpoints[0], w.file.address, strings.TrimPrefix(w.file.digest, "sha256:")
	if hex == "" && w.file.known {
		found, err := e.client.checksum(ctx, a)
		if err != nil {
			return unknownDigest, err
		}
		hex, w.sum512 = found.sha256, found.sha512
	}
	switch {
	case hex == "" && w.sum512 == "" && !e.client.vouched(a.url):
		return unknownDigest, fmt.Errorf("it has no digest, and without TLS nothing else says "+
			"what is right: write %s@sha256:DIGEST, or name %s with --insecure-registry", w.ref,
			a.url.Host)
	case hex == unknownDigest.Hex:
		return unknownDigest, errors.New("its digest is all zeros, which no file has: write the " +
			"real one")
	case hex == "":
		return unknownDigest, nil
	}
	return v1.NewHash("sha256:" + hex)
}

// translate reads the file to find the SHA-256, if only its SHA-512 is known.
func (w *webSource) translate(ctx context.Context, desc v1.Descriptor) (v1.Descriptor, error) {
	w.endpoints[0].client.opt.Warn(fmt.Sprintf("%s: only its SHA-512 is known: all of it is read "+
		"once for its SHA-256; write that into the address to save this", w.ref))
	b, err := w.Blob(desc)
	if err == nil {
		err = b.Read(ctx, func(io.Reader) error { return nil })
	}
	if err == nil {
		desc.Digest, err = v1.NewHash(w.learned.orFirst(""))
	}
	return desc, err
}

// size asks how long the file is; -1: the server does not say. It requests the first byte, whose
// answer also has what the server says about the file. HEAD fails with addresses that are signed
// for GET.
func (w *webSource) size(ctx context.Context) (size int64, err error) {
	e := w.endpoints[0]
	err = e.retry(ctx, func() error {
		size, err = e.sizeOnce(ctx)
		return err
	})
	if err == nil && size == 0 {
		err = errors.New("the file is empty")
	}
	return size, err
}

func (e *endpoint) sizeOnce(ctx context.Context) (int64, error) {
	first := request{method: http.MethodGet, header: http.Header{"Range": {"bytes=0-0"}},
		accept: []int{http.StatusPartialContent, http.StatusOK}}
	res, err := e.part(ctx, nil, first, 0)
	if err != nil {
		return 0, err
	}
	_ = res.Body.Close()
	if res.StatusCode == http.StatusOK {
		return res.ContentLength, nil
	}
	if _, size, _ := contentRange(res.Header.Get("Content-Range")); size >= 0 {
		return size, nil
	}
	if res, err = e.once(ctx, nil, wholeRequest(first)); err != nil { // it may say the size
		return 0, err
	}
	return res.ContentLength, res.Body.Close()
}

func (w *webSource) Blob(desc v1.Descriptor) (*Blob, error) {
	b := &Blob{Desc: desc, from: w.repository}
	if desc.Digest == unknownDigest {
		b.learned, b.sum512 = w.learned, w.sum512
	}
	return b, nil
}

func (w *webSource) Origin() string {
	return fmt.Sprintf("%t %s", w.endpoints[0].secure, w.ref.RepositoryText())
}

// learned is the digest that a file had when all of it was first read. "": it was not read yet.
type learned struct {
	mu     sync.Mutex
	digest string // guarded by mu
}

func (l *learned) orFirst(got string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.digest = cmp.Or(l.digest, got)
	return l.digest
}

// Content is the digest by which people know the image: of what Ref names, so that it may replace
// Ref; or of the file at an address, as others publish it. "": unknown so far.
func (r *Image) Content() string {
	w := webOf(r.Source)
	if w == nil {
		return r.Named
	}
	if digest := ContentDigest(r.Manifest); digest != "" {
		return digest
	}
	return w.learned.orFirst("")
}

// Platform is the digest of this machine's image in the list that Ref names. "": it is no list.
func (r *Image) Platform() string {
	if r.Named == r.Digest {
		return ""
	}
	return r.Digest
}

// webOf returns the file at an address, if the source is one; nil: it is an image.
func webOf(src Source) *webSource {
	if g, ok := src.(*gated); ok {
		src = g.Source
	}
	w, _ := src.(*webSource)
	return w
}

// ContentDigest is the digest of the file at an address, from its manifest. "": unknown so far.
func ContentDigest(m *v1.Manifest) string {
	if digest := m.Layers[0].Digest; digest != unknownDigest {
		return digest.String()
	}
	return ""
}

// LayerText names a layer for people.
func (r *Image) LayerText(i int) string {
	if r.Ref.IsAddress() {
		return r.Ref.String() // it has no other name
	}
	return fmt.Sprintf("layer %s of %s", r.Manifest.Layers[i].Digest, r.Ref)
}

// webFile says how to request a file.
type webFile struct {
	*address
	client     *http.Client
	credential authn.ContextAuthenticator
	known      bool // the digest is known, and decides what is right
}

// ReplacedError says that the file at an address was replaced.
type ReplacedError struct {
	Host    string
	Was, Is int64 // bytes
}

func (e *ReplacedError) Error() string {
	return fmt.Sprintf("%s has another file at the address than before (%d bytes, and now %d): it "+
		"was replaced; name the new one by its digest, or put the old one back",
		e.Host, e.Was, e.Is)
}

// webEndpoint is the endpoint for the file at an address.
func (c *Client) webEndpoint(a *address) (*endpoint, error) {
	registry, err := name.NewRegistry(a.url.Host)
	if err != nil {
		return nil, err
	}
	named := slices.Contains(c.opt.Insecure, a.url.Host)
	w := &webFile{address: a,
		credential: c.keychain.For(webTarget{a.url.Host, path.Clean(a.url.Path)})}
	e := &endpoint{client: c, repo: registry.Repo("file"),
		secure: a.url.Scheme == "https" && !named, web: w}
	w.client = &http.Client{Transport: e.guard(named), CheckRedirect: func(req *http.Request,
		via []*http.Request) error {
		return e.mayFollow(req, via)
	}}
	return e, nil
}

// mayFollow decides whether a redirect is followed. Only the named host gets the credential. No
// host gets the address that led to it: its query may be a secret.
func (e *endpoint) mayFollow(req *http.Request, via []*http.Request) error {
	from, to := e.web.url, req.URL
	tidy(to)
	req.Header.Del("Referer")
	for _, r := range append(slices.Clone(via), req) {
		if r.URL.Scheme != from.Scheme || hostOf(r.URL) != hostOf(from) {
			req.Header.Del("Authorization")
		}
	}
	switch {
	case len(via) >= maxRedirects:
		return permanent(fmt.Errorf("stopped after %d redirects", maxRedirects))
	case to.Scheme != "https" && to.Scheme != "http":
		return permanent(fmt.Errorf("it redirects to an address of %q", to.Scheme))
	case e.secure && to.Scheme == "http", e.client.vouched(from) && !e.client.vouched(to):
		return permanent(fmt.Errorf("it redirects to %s, which is without TLS: if that is "+
			"intended, name %s with --insecure-registry", to.Host, from.Host))
	case e.web.within != nil && !covered(e.web.within, to):
		return permanent(fmt.Errorf("it redirects to %s, which is not below an address that is "+
			"allowed here", to.Host))
	}
	return nil
}

// webTarget is a host, and a path there, to look up credentials for.
type webTarget struct{ host, path string }

func (t webTarget) String() string      { return t.host + t.path }
func (t webTarget) RegistryStr() string { return t.host }

// authorize gives a request the credential for its host. Without TLS it is sent only to hosts named
// by --insecure-registry, and inside of this machine.
func (w *webFile) authorize(ctx context.Context, c *Client, req *http.Request) error {
	if !c.vouched(w.url) {
		return nil
	}
	found, err := w.credential.AuthorizationContext(ctx)
	if err != nil {
		return permanent(err)
	}
	switch {
	case found.Username != "":
		req.SetBasicAuth(found.Username, found.Password)
	case found.RegistryToken != "":
		req.Header.Set("Authorization", "Bearer "+found.RegistryToken)
	}
	return nil
}

// once requests the file, or a part of it.
func (w *webFile) once(ctx context.Context, e *endpoint, r request) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, r.method, w.url.String(), nil)
	if err != nil {
		return nil, permanent(errors.New("the address cannot be asked for"))
	}
	maps.Copy(req.Header, r.header)
	req.Header.Set("Accept-Encoding", "identity") // ranges are those of the file
	if err := w.authorize(ctx, e.client, req); err != nil {
		return nil, err
	}
	res, err := e.send(w.client, req, r.accept)
	if err != nil {
		return nil, w.explain(err)
	}
	if err := w.check(res); err != nil {
		_ = res.Body.Close()
		return nil, permanent(err)
	}
	return res, nil
}

// explain adds to a refusal what people overlook.
func (w *webFile) explain(err error) error {
	status := statusOf(err)
	if w.url.RawQuery != "" &&
		(status == http.StatusForbidden || status == http.StatusBadRequest) {
		return fmt.Errorf("%w; if the query of the address is a signature, it may have expired",
			err)
	}
	return err
}

// check refuses an answer in another form, unless a digest decides what is right.
func (w *webFile) check(res *http.Response) error {
	if how := res.Header.Get("Content-Encoding"); !w.known && hides(how) {
		return fmt.Errorf("%s says that it sends the file in another form (Content-Encoding: %q) "+
			"than it was asked for: name the file by its digest, ADDRESS@sha256:DIGEST",
			res.Request.URL.Host, words(how, res.Request))
	}
	return nil
}
