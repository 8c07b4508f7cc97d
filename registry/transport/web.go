package transport

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// webSource is a file behind an address, as an image of one layer: the file itself. So it is read,
// cached, verified and kept as any layer is that is no archive. Its manifest is made here, of the
// name, the size and the digest of the file.
type webSource struct {
	*repository // with one endpoint
	file        *webFile
	learned     *learned
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
	return &webSource{repository: &repository{ref: ref, endpoints: []*endpoint{e},
		spoolDir: spoolDir}, file: e.web, learned: new(learned)}, nil
}

// Manifest makes a manifest. If nobody has said the digest of the file, and the server is one whose
// word counts, its first whole content says it.
func (w *webSource) Manifest(ctx context.Context, _ string) ([]byte, string, error) {
	e, a := w.endpoints[0], w.file.address
	digest := unknownDigest
	var err error
	switch {
	case a.digest != "":
		digest, err = v1.NewHash(a.digest)
	case e.client.opt.Checksums != "":
		digest, err = e.client.checksum(ctx, a)
	case !e.client.vouched(a.url):
		err = fmt.Errorf("it has no digest, and without TLS nothing else says what is right: "+
			"write %s@sha256:DIGEST, or name %s with --insecure-registry", w.ref, a.url.Host)
	}
	if said := a.digest != "" || e.client.opt.Checksums != ""; err == nil && said &&
		digest == unknownDigest {
		err = errors.New("its digest is said to be all zeros, as nothing has: write the right one")
	}
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", w.ref, err)
	}
	size, err := w.size(ctx, digest)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", w.ref, err)
	}
	empty, _ := v1.NewHash(DigestOf([]byte(emptyJSON)))
	content, err := json.Marshal(v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: mediaEmpty, Size: int64(len(emptyJSON)), Digest: empty},
		Layers: []v1.Descriptor{{MediaType: mediaFile, Size: size, Digest: digest,
			Annotations: map[string]string{titleAnnotation: a.file()}}}})
	return content, string(types.OCIManifestSchema1), err
}

// size asks how long the file is. A request for its first byte also tells what a server says of it.
// HEAD does not work with addresses that are signed for GET.
func (w *webSource) size(ctx context.Context, digest v1.Hash) (int64, error) {
	res, err := w.endpoints[0].do(ctx, nil, request{method: http.MethodGet,
		header: http.Header{"Range": {"bytes=0-0"}},
		accept: []int{http.StatusPartialContent, http.StatusOK}})
	var shorter *ReplacedError
	switch {
	case errors.As(err, &shorter) && shorter.Is == tooShort:
		return 0, errEmpty
	case err != nil:
		return 0, err
	}
	defer res.Body.Close()
	if digest != unknownDigest {
		if err := w.file.pin(res); err != nil {
			return 0, err
		}
	}
	size := res.ContentLength
	if res.StatusCode == http.StatusPartialContent {
		first, total, ok := contentRange(res.Header.Get("Content-Range"))
		if size = total; !ok || first != 0 {
			return 0, fmt.Errorf("%s answers with the range %q, and was asked for the first byte",
				res.Request.URL.Host, res.Header.Get("Content-Range"))
		}
	}
	switch {
	case size < 0:
		return 0, fmt.Errorf("%s does not say how long the file is: fetch it with another "+
			"program, such as curl", res.Request.URL.Host)
	case size == 0:
		return 0, errEmpty
	}
	return size, nil
}

var errEmpty = errors.New("the file is empty")

// tooShort is what an answer says of a file that does not have the part that was asked for.
const tooShort = "without it"

func (w *webSource) Blob(desc v1.Descriptor) (*Blob, error) {
	b := &Blob{Desc: desc, from: w.repository}
	if desc.Digest == unknownDigest {
		b.learned = w.learned
	}
	return b, nil
}

// Warm does nothing: there is no index to wait for.
func (w *webSource) Warm(context.Context, v1.Hash) {}

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
	if l.digest == "" {
		l.digest = got
	}
	return l.digest
}

// Content names what the image has, for people: the file behind an address has a digest that
// others know, too. All others are known by their manifest.
func (r *Image) Content() string {
	src := r.Source
	if g, ok := src.(*gated); ok {
		src = g.Source
	}
	w, ok := src.(*webSource)
	if !ok {
		return r.Digest
	}
	if digest := ContentDigest(r.Manifest); digest != "" {
		return digest
	}
	return w.learned.orFirst("")
}

// ContentDigest is the digest of the file at an address, by its manifest. "": it is not known yet.
func ContentDigest(m *v1.Manifest) string {
	if digest := m.Layers[0].Digest; digest != unknownDigest {
		return digest.String()
	}
	return ""
}

// LayerText names a layer for people.
func (r *Image) LayerText(i int) string {
	if r.Ref.IsAddress() {
		return r.Ref.String() // it has no other one
	}
	return fmt.Sprintf("layer %s of %s", r.Manifest.Layers[i].Digest, r.Ref)
}

// webFile is how a file is asked for.
type webFile struct {
	*address
	client     *http.Client
	credential *looked

	mu   sync.Mutex
	seen map[string]version // guarded by mu; by the address that has answered
}

// version is what a server says to tell one content of a file from another.
type version struct{ tag, modified string }

// differs reports whether a server speaks of another file. If it says less than before, that tells
// nothing.
func (v version) differs(is version) bool {
	if v.tag != "" && is.tag != "" {
		return v.tag != is.tag
	}
	return v.modified != "" && is.modified != "" && v.modified != is.modified
}

func (v version) String() string {
	if v.tag != "" {
		return "ETag " + v.tag
	}
	return "Last-Modified " + v.modified
}

// maxSeen bounds how many addresses that answer are remembered: each redirect may lead to another
// one.
const maxSeen = 256

// ReplacedError says that the file behind an address is not the one that was there before.
type ReplacedError struct{ Host, Was, Is string }

func (e *ReplacedError) Error() string {
	return fmt.Sprintf("%s has another file at the address than before (%s, and now %s): it was "+
		"replaced; name the new one by its digest, or put the old one back", e.Host, e.Was, e.Is)
}

// webEndpoint is how to ask for the file at an address.
func (c *Client) webEndpoint(a *address) (*endpoint, error) {
	registry, err := name.NewRegistry(a.url.Host)
	if err != nil {
		return nil, err
	}
	named := slices.Contains(c.opt.Insecure, a.url.Host)
	w := &webFile{address: a, seen: make(map[string]version), credential: &looked{
		keychain: c.keychain, target: webTarget{a.url.Host, path.Clean(a.url.Path)}}}
	e := &endpoint{client: c, repo: registry.Repo("file"),
		secure: a.url.Scheme == "https" && !named, web: w}
	w.client = &http.Client{Transport: e.guard(named), CheckRedirect: func(req *http.Request,
		via []*http.Request) error {
		return e.mayFollow(req, via)
	}}
	return e, nil
}

// mayFollow decides whether a redirect is followed. Only who was named gets the credential, and
// nobody is told the address that led there: its query may be a secret.
func (e *endpoint) mayFollow(req *http.Request, via []*http.Request) error {
	from, to := e.web.url, req.URL
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

// webTarget is what credentials are looked up for: a host, and the path there.
type webTarget struct{ host, path string }

func (t webTarget) String() string      { return t.host + t.path }
func (t webTarget) RegistryStr() string { return t.host }

// authorize gives a request the credential for its host. Without TLS it goes out only to who is
// named with --insecure-registry, and inside of this machine.
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

// once asks for the file, or for a part of it.
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
	var status *StatusError
	if errors.As(err, &status) && status.Status == http.StatusRequestedRangeNotSatisfiable {
		return permanent(&ReplacedError{Host: status.Host, Was: "with the part that is asked for",
			Is: tooShort})
	}
	if w.url.RawQuery != "" && errors.As(err, &status) &&
		(status.Status == http.StatusForbidden || status.Status == http.StatusBadRequest) {
		return fmt.Errorf("%w; if the query of the address is a signature, it may have expired",
			err)
	}
	return err
}

// check refuses an answer that is not the file.
func (w *webFile) check(res *http.Response) error {
	host := res.Request.URL.Host
	if how := res.Header.Get("Content-Encoding"); how != "" && how != "identity" && !w.isPacked() {
		return fmt.Errorf("%s sends the file in another form (Content-Encoding: %q) than it was "+
			"asked for", host, how)
	}
	return nil
}

// pin refuses an answer that is of another file than an earlier one from the same address.
func (w *webFile) pin(res *http.Response) error {
	is := version{strings.TrimPrefix(res.Header.Get("ETag"), "W/"),
		res.Header.Get("Last-Modified")}
	at := shown(res.Request.URL)
	w.mu.Lock()
	defer w.mu.Unlock()
	was, seen := w.seen[at]
	if seen && was.differs(is) {
		return permanent(&ReplacedError{Host: res.Request.URL.Host, Was: was.String(),
			Is: is.String()})
	}
	if !seen && len(w.seen) < maxSeen {
		w.seen[at] = is
	}
	return nil
}

// isPacked reports whether the name says that the file is compressed. Servers say then, too, that
// its content is encoded.
func (w *webFile) isPacked() bool {
	return slices.Contains([]string{".gz", ".tgz", ".xz", ".txz", ".zst", ".bz2", ".Z"},
		path.Ext(w.file()))
}
