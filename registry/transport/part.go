package transport

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
)

// A server is first asked for a part of a file, and for all of it if it does not send parts.
// Servers that cannot send a part behave differently: by RFC 9110, section 14.2, they send the
// whole, but many answer with an error.

// maxFailed is how often in a row a server may refuse a part for a possibly different reason, such
// as an expired signature, and maxErrors how often it may fail, as in an outage. Then it is asked
// for the whole, unless it has sent a part of the same path before.
const (
	maxFailed = 2
	maxErrors = 4
)

// part sends a request for the part that begins at first. The answer may be the whole.
func (e *endpoint) part(ctx context.Context, scopes []string, r request, first int64) (
	*http.Response, error) {
	res, err := e.once(ctx, scopes, r)
	if !e.refuses(res, err, r.path, first) {
		return res, err
	}
	if res != nil {
		_ = res.Body.Close()
	}
	return e.once(ctx, scopes, wholeRequest(r))
}

// wholeRequest is a request for all of the file of which another request asks for a part.
func wholeRequest(r request) request {
	r.header = r.header.Clone()
	r.header.Del("Range")
	r.accept = []int{http.StatusOK}
	return r
}

// refuses reports whether an answer is not the part that begins at first, and the server may send
// the whole of the file at path.
func (e *endpoint) refuses(res *http.Response, err error, path string, first int64) bool {
	var status *StatusError
	switch {
	case err == nil:
		e.failed.Store(0)
		if res.StatusCode != http.StatusPartialContent {
			return false
		}
		begin, _, ok := contentRange(res.Header.Get("Content-Range"))
		if ok = ok && begin == first; ok {
			e.parts.LoadOrStore(path, true)
		}
		return !ok
	case !errors.As(err, &status):
		return false
	}
	often := func(most int32) bool {
		_, sent := e.parts.Load(path)
		return !sent && e.failed.Add(1) >= most
	}
	switch s := status.Status; s {
	case http.StatusUnauthorized, http.StatusNotFound, http.StatusGone,
		http.StatusProxyAuthRequired, http.StatusRequestTimeout, http.StatusTooManyRequests:
		return false
	case http.StatusForbidden, http.StatusBadRequest:
		return !status.passes() || often(maxFailed)
	case http.StatusNotImplemented:
		return true
	default:
		return s >= 400 && (s < 500 || often(maxErrors))
	}
}

// hides reports whether a coding (RFC 9110, section 8.4.1) would hide a file's format. A coding
// that can be recognised is removed by the content, as if the publisher had compressed the file.
// Servers also name codings that do not exist, such as "none" and "aws-chunked".
func hides(codings string) bool {
	return slices.ContainsFunc(strings.Split(strings.ToLower(codings), ","), func(c string) bool {
		return slices.Contains([]string{"aes128gcm", "br", "compress", "dcb", "dcz", "deflate",
			"exi", "pack200-gzip", "x-compress"}, strings.TrimSpace(c))
	})
}
