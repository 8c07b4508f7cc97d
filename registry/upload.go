package registry

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

// uploadPiece is how much is sent with one request. What a broken connection loses is at most that,
// and proxies limit what they take. Bytes.
const uploadPiece = 64 << 20

// uploader sends blobs and manifests to a repository (OCI distribution specification, "Push").
type uploader struct {
	endpoint *endpoint
	scopes   []string
	from     string // a repository of the same registry, to mount blobs from; "": none
	sent     *atomic.Int64
}

// has asks whether the registry has the blob.
func (u *uploader) has(ctx context.Context, desc v1.Descriptor) (bool, error) {
	res, err := u.endpoint.do(
		ctx,
		u.scopes,
		request{method: http.MethodHead, path: "blobs/" + desc.Digest.String(),
			accept: []int{http.StatusOK, http.StatusNotFound}},
	)
	if err != nil {
		return false, err
	}
	res.Body.Close()
	if res.StatusCode == http.StatusOK && res.ContentLength >= 0 && res.ContentLength != desc.Size {
		return false, fmt.Errorf(
			"the registry has %s with %d bytes instead of %d",
			desc.Digest,
			res.ContentLength,
			desc.Size,
		)
	}
	return res.StatusCode == http.StatusOK, nil
}

// begin asks for an upload, or for the blob to be mounted. The address is nil where it is there
// already.
func (u *uploader) begin(ctx context.Context, desc v1.Descriptor) (*url.URL, error) {
	query := ""
	if u.from != "" {
		query = "?" + url.Values{"mount": {desc.Digest.String()}, "from": {u.from}}.Encode()
	}
	res, err := u.endpoint.do(
		ctx,
		u.scopes,
		request{method: http.MethodPost, path: "blobs/uploads/" + query,
			accept: []int{http.StatusAccepted, http.StatusCreated}},
	)
	if err != nil {
		return nil, err
	}
	res.Body.Close()
	if res.StatusCode == http.StatusCreated {
		return nil, nil
	}
	return location(res)
}

// location is where an upload goes on.
func location(res *http.Response) (*url.URL, error) {
	at, err := res.Location()
	if err != nil {
		return nil, permanent(
			fmt.Errorf("%s does not say where an upload goes on: %w", res.Request.URL.Host, err),
		)
	}
	return at, nil
}

// blob sends a blob, unless the registry has it. What has arrived of it before a connection broke
// is not sent again.
func (u *uploader) blob(ctx context.Context, desc v1.Descriptor, from content) error {
	there, err := u.has(ctx, desc)
	if err != nil {
		return err
	}
	if there {
		u.sent.Add(desc.Size)
		return nil
	}
	t := u.endpoint.tries(u.scopes)
	var at *url.URL
	off := int64(0)
	for {
		if at == nil {
			u.sent.Add(-off)
			off = 0
			if at, err = u.begin(ctx, desc); err != nil {
				return err
			}
			if at == nil {
				u.sent.Add(desc.Size)
				return nil
			}
		}
		next, err := u.piece(ctx, at, desc, from, off)
		if err == nil {
			t.progress()
			u.sent.Add(next.off - off)
			at, off = next.at, next.off
			if next.done {
				return nil
			}
			continue
		}
		if err := t.again(ctx, err); err != nil {
			return fmt.Errorf("sending %s: %w", desc.Digest, err)
		}
		for {
			if next, err = u.status(ctx, at); err == nil {
				u.sent.Add(next.off - off)
				at, off = next.at, next.off
				break
			}
			var gone *StatusError
			if errors.As(err, &gone) && gone.Status/100 == 4 &&
				gone.Status != http.StatusTooManyRequests ||
				errors.Is(err, errUnsaid) {
				at = nil // it knows nothing of this upload any more
				break
			}
			if err := t.again(ctx, err); err != nil {
				return fmt.Errorf("sending %s: %w", desc.Digest, err)
			}
		}
	}
}

// errUnsaid is a registry that does not say how much of an upload has arrived.
var errUnsaid = permanent(errors.New("the registry does not say how much has arrived"))

// step is how far an upload is.
type step struct {
	at   *url.URL
	off  int64
	done bool
}

// piece sends the next piece, or ends the upload where everything is there.
func (u *uploader) piece(
	ctx context.Context,
	at *url.URL,
	desc v1.Descriptor,
	from content,
	off int64,
) (step, error) {
	if off == desc.Size {
		query := at.Query()
		query.Set("digest", desc.Digest.String())
		final := *at
		final.RawQuery = query.Encode()
		res, err := u.send(
			ctx,
			http.MethodPut,
			&final,
			http.Header{},
			nil,
			0,
			http.StatusCreated,
			http.StatusNoContent,
		)
		if err != nil {
			return step{}, err
		}
		res.Body.Close()
		return step{off: off, done: true}, nil
	}
	n := min(uploadPiece, desc.Size-off)
	header := http.Header{"Content-Type": {"application/octet-stream"},
		"Content-Range": {fmt.Sprintf("%d-%d", off, off+n-1)}}
	res, err := u.send(
		ctx,
		http.MethodPatch,
		at,
		header,
		io.NewSectionReader(from, off, n),
		n,
		http.StatusAccepted,
		http.StatusNoContent,
	)
	if err != nil {
		return step{}, err
	}
	res.Body.Close()
	next, err := location(res)
	if err != nil {
		return step{}, err
	}
	if got, ok := uploaded(res); ok && got != off+n {
		return step{}, fmt.Errorf("%s has %d bytes of %d that were sent", at.Host, got, off+n)
	}
	return step{at: next, off: off + n}, nil
}

// status asks how much has arrived.
func (u *uploader) status(ctx context.Context, at *url.URL) (step, error) {
	res, err := u.send(ctx, http.MethodGet, at, http.Header{}, nil, 0, http.StatusNoContent)
	if err != nil {
		return step{}, err
	}
	res.Body.Close()
	got, ok := uploaded(res)
	if !ok || got <= 1 { // distribution says "0-0" of one byte and of none
		return step{}, errUnsaid
	}
	next, err := location(res)
	if err != nil {
		next = at
	}
	return step{at: next, off: got}, nil
}

// uploaded reads "Range: 0-LAST" of an answer about an upload.
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
func (u *uploader) send(
	ctx context.Context,
	method string,
	at *url.URL,
	header http.Header,
	body io.Reader,
	length int64,
	accept ...int,
) (*http.Response, error) {
	a, err := u.endpoint.authorize(ctx, u.scopes)
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
		req.GetBody = func() (io.ReadCloser, error) { // where a token has to be asked for first
			_, err := section.Seek(0, io.SeekStart)
			return io.NopCloser(section), err
		}
	}
	return u.endpoint.send(a, req, accept)
}

// manifest stores a manifest under its digest, or under a tag.
func (u *uploader) manifest(ctx context.Context, name, mediaType string, text []byte) error {
	t := u.endpoint.tries(u.scopes)
	for {
		at := &url.URL{Scheme: "https", Host: u.endpoint.repo.RegistryStr(),
			Path: fmt.Sprintf("/v2/%s/manifests/%s", u.endpoint.repo.RepositoryStr(), name)}
		body := io.NewSectionReader(strings.NewReader(string(text)), 0, int64(len(text)))
		res, err := u.send(
			ctx,
			http.MethodPut,
			at,
			http.Header{"Content-Type": {mediaType}},
			body,
			body.Size(),
			http.StatusCreated,
			http.StatusOK,
			http.StatusAccepted,
		)
		if err == nil {
			return res.Body.Close()
		}
		if err := t.again(ctx, err); err != nil {
			return err
		}
	}
}
