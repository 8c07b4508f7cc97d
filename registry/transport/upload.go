package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// content is a blob that can be sent from any byte on.
type content interface {
	io.ReaderAt
	Size() int64
}

// source is a content whose errors end an upload: no registry can help.
type source struct{ content }

type sourceError struct{ error }

func (e *sourceError) Unwrap() error { return e.error }

func (s source) ReadAt(p []byte, off int64) (n int, err error) {
	n, err = s.content.ReadAt(p, off)
	if err != nil && off+int64(n) < s.Size() {
		err = &sourceError{permanent(err)}
	}
	return n, err
}

// Uploader sends blobs and manifests to a repository (OCI distribution specification, "Push").
type Uploader struct {
	endpoint *endpoint
	scopes   []string
	from     string // a repository of the same registry, to mount blobs from; "": none
	// unmounted: the registry has refused to mount blobs, or access to the other repository
	unmounted atomic.Bool
	sent      *atomic.Int64
	kept      string // the directory for notes on uploads; "": there are none
}

// Uploader prepares to send to a repository. Blobs of the image from are mounted if it is in the
// same registry; the zero Reference: there is none. sent counts bytes. notes is a directory for
// notes on uploads that may go on after a restart; "": there are none.
func (c *Client) Uploader(to, from Reference, sent *atomic.Int64, notes string) (*Uploader, error) {
	endpoints, err := c.endpoints(to.remote.Context(), false)
	if err != nil {
		return nil, err
	}
	e := endpoints[0]
	u := &Uploader{endpoint: e, scopes: []string{e.repo.Scope("pull,push")}, sent: sent,
		kept: notes}
	if from.Host() == to.Host() && from.remote.Context().RepositoryStr() != e.repo.RepositoryStr() {
		u.from = from.remote.Context().RepositoryStr()
		u.scopes = append(u.scopes, from.remote.Context().Scope("pull"))
	}
	return u, nil
}

// refusesMount reports whether the error may be a refusal to mount blobs. From then on they are
// sent.
func (u *Uploader) refusesMount(err error) bool {
	var status *StatusError
	if !errors.As(err, &status) || status.Status == http.StatusTooManyRequests {
		return false
	}
	if !u.unmounted.Swap(true) {
		u.endpoint.client.opt.Warn(fmt.Sprintf("%v; blobs of %s are sent instead of mounted", err,
			u.from))
	}
	return true
}

// asked are the scopes to request: without the other repository once it was refused.
func (u *Uploader) asked() []string {
	if u.unmounted.Load() {
		return u.scopes[:1]
	}
	return u.scopes
}

// has asks whether the registry has the blob.
func (u *Uploader) has(ctx context.Context, desc v1.Descriptor) (bool, error) {
	var res *http.Response
	err := u.endpoint.retry(ctx, func() (err error) {
		res, err = u.endpoint.once(ctx, u.asked(), request{method: http.MethodHead,
			path:   "blobs/" + desc.Digest.String(),
			accept: []int{http.StatusOK, http.StatusNotFound}})
		return err
	})
	if u.from != "" && !u.unmounted.Load() && !GaveUp(err) && u.refusesMount(err) {
		return u.has(ctx, desc) // the registry may refuse a token for both repositories
	}
	if err != nil {
		return false, err
	}
	res.Body.Close()
	if res.StatusCode == http.StatusOK && res.ContentLength >= 0 && res.ContentLength != desc.Size {
		return false, fmt.Errorf("the registry has %s with %d bytes instead of %d", desc.Digest,
			res.ContentLength, desc.Size)
	}
	return res.StatusCode == http.StatusOK, nil
}

// begin begins an upload, or mounts the blob. The address is nil if the blob is there already.
func (u *Uploader) begin(ctx context.Context, desc v1.Descriptor) (*url.URL, error) {
	query, mount := "", u.from != "" && !u.unmounted.Load()
	if mount {
		query = "?" + url.Values{"mount": {desc.Digest.String()}, "from": {u.from}}.Encode()
	}
	res, err := u.endpoint.once(ctx, u.asked(),
		request{method: http.MethodPost, path: "blobs/uploads/" + query,
			accept: []int{http.StatusAccepted, http.StatusCreated}})
	if mount && u.refusesMount(err) {
		return u.begin(ctx, desc)
	}
	if err != nil {
		return nil, err
	}
	res.Body.Close()
	if res.StatusCode == http.StatusCreated {
		return nil, nil
	}
	return location(res)
}

// location is the address where an upload goes on.
func location(res *http.Response) (*url.URL, error) {
	at, err := res.Location()
	if err != nil {
		return nil, permanent(
			fmt.Errorf("%s does not say where an upload goes on: %w", res.Request.URL.Host, err))
	}
	tidy(at)
	return at, nil
}

// withDigest is the address that ends an upload. The registry's own query stays unchanged: it may
// be signed.
func withDigest(at *url.URL, digest v1.Hash) *url.URL {
	final := *at
	if final.RawQuery != "" {
		final.RawQuery += "&"
	}
	final.RawQuery += "digest=" + url.QueryEscape(digest.String())
	return &final
}

// errUnsaid says that the registry does not tell how much of an upload has arrived.
var errUnsaid = permanent(errors.New("the registry does not say how much has arrived"))

// errNotKept says that the registry has accepted a piece and does not have it.
var errNotKept = errors.New("the registry does not keep the pieces of a blob")

// whole sends a blob in the request that ends its upload.
func (u *Uploader) whole(ctx context.Context, at *url.URL, desc v1.Descriptor, from content) error {
	res, err := u.send(ctx, http.MethodPut, withDigest(at, desc.Digest),
		http.Header{"Content-Type": {"application/octet-stream"}},
		io.NewSectionReader(from, 0, desc.Size), desc.Size, http.StatusCreated,
		http.StatusNoContent)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// finish ends an upload when all data has arrived.
func (u *Uploader) finish(ctx context.Context, at *url.URL, desc v1.Descriptor) error {
	res, err := u.send(ctx, http.MethodPut, withDigest(at, desc.Digest), http.Header{}, nil, 0,
		http.StatusCreated, http.StatusNoContent)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// piece sends n bytes from off on, and returns where the upload goes on.
func (u *Uploader) piece(ctx context.Context, at *url.URL, from content, off, n int64) (*url.URL,
	error) {
	header := http.Header{"Content-Type": {"application/octet-stream"},
		"Content-Range": {fmt.Sprintf("%d-%d", off, off+n-1)}}
	res, err := u.send(ctx, http.MethodPatch, at, header, io.NewSectionReader(from, off, n), n,
		http.StatusAccepted, http.StatusNoContent, http.StatusCreated) // Amazon answers 201
	if err != nil {
		return nil, err
	}
	res.Body.Close()
	next, err := location(res)
	if err != nil {
		next = at
	}
	if got, ok := uploaded(res); ok && got <= off {
		return nil, errNotKept
	} else if ok && got != off+n {
		return nil, fmt.Errorf("%s has %d bytes of %d that were sent", at.Host, got, off+n)
	}
	return next, nil
}

// status asks how much has arrived, and where the upload goes on.
func (u *Uploader) status(ctx context.Context, at *url.URL) (*url.URL, int64, error) {
	res, err := u.send(ctx, http.MethodGet, at, http.Header{}, nil, 0, http.StatusNoContent)
	if err != nil {
		return nil, 0, err
	}
	res.Body.Close()
	got, ok := uploaded(res)
	if !ok || got <= 1 { // distribution says "0-0" for one byte and for none
		return nil, 0, errUnsaid
	}
	next, err := location(res)
	if err != nil {
		next = at
	}
	return next, got, nil
}

// uploaded parses "Range: 0-LAST" of an answer about an upload.
func uploaded(res *http.Response) (n int64, ok bool) {
	text := strings.TrimPrefix(res.Header.Get("Range"), "bytes=")
	first, last, found := strings.Cut(text, "-")
	if !found || first != "0" {
		return 0, false
	}
	n, err := strconv.ParseInt(last, 10, 64)
	return n + 1, err == nil && n >= 0
}

// send sends a request to an address that the registry has given.
func (u *Uploader) send(ctx context.Context, method string, at *url.URL, header http.Header,
	body io.Reader, length int64, accept ...int) (*http.Response, error) {
	a, err := u.endpoint.authorize(ctx, u.asked())
	if err != nil {
		return nil, explain(err)
	}
	req, err := http.NewRequestWithContext(ctx, method, at.String(), nil)
	if err != nil {
		return nil, permanent(err)
	}
	req.Header = header
	if body != nil {
		req.Body, req.ContentLength = io.NopCloser(body), length
		section := body.(*io.SectionReader)
		req.GetBody = func() (io.ReadCloser, error) { // the former one may still be read
			return io.NopCloser(io.NewSectionReader(section, 0, section.Size())), nil
		}
	}
	res, err := u.endpoint.send(a, req, accept)
	if own, ok := errors.AsType[*sourceError](err); ok { // nothing is wrong with the connection
		err = own
	}
	return res, err
}

// Manifest stores a manifest under its digest, or under a tag.
func (u *Uploader) Manifest(ctx context.Context, name, mediaType string, text []byte) error {
	err := u.endpoint.retry(ctx, func() error {
		at := &url.URL{Scheme: "https", Host: u.endpoint.repo.RegistryStr(),
			Path: fmt.Sprintf("/v2/%s/manifests/%s", u.endpoint.repo.RepositoryStr(), name)}
		body := io.NewSectionReader(strings.NewReader(string(text)), 0, int64(len(text)))
		res, err := u.send(ctx, http.MethodPut, at, http.Header{"Content-Type": {mediaType}}, body,
			body.Size(), http.StatusCreated, http.StatusOK, http.StatusAccepted)
		if err != nil {
			return err
		}
		res.Body.Close()
		if res.StatusCode == http.StatusCreated ||
			res.Header.Get("Docker-Content-Digest") == DigestOf(text) {
			return nil
		}
		return u.stored(ctx, name, text)
	})
	if err != nil && strings.Contains(err.Error(), "BLOB_UNKNOWN") {
		err = fmt.Errorf("%w; something in %s was removed meanwhile: try again", err,
			u.endpoint.repo.Name())
	}
	return err
}

// stored asks for a manifest that was sent, because the answer was none of a registry that follows
// the specification. A proxy may have given it, and then nothing was stored.
func (u *Uploader) stored(ctx context.Context, name string, text []byte) error {
	got, _, err := u.endpoint.text(ctx, u.asked(), manifestRequest(name))
	if err == nil {
		err = CheckDigest(got, DigestOf(text))
	}
	if err != nil && ctx.Err() == nil { // also a refusal: the manifest is sent again
		return fmt.Errorf("%s has accepted the manifest %s, but does not give it: %v",
			u.endpoint.repo.RegistryStr(), name, err)
	}
	return err
}
