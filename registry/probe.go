package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// A registry is asked for "/v2/" first, to learn how it wants to be asked: whether with TLS, and
// with which kind of credential. A manifest that is asked for without one tells the same, and is
// mostly what is wanted next: that saves a round trip, and where a registry is named as one without
// TLS, another one, as both ways are tried at once.

// tlsFirst is how much longer than the answer without TLS one with TLS may take to be preferred.
const tlsFirst = 300 * time.Millisecond

// answer is what a registry says to a first request. An error that is not nil says that it has not
// answered.
type answer struct {
	scheme string
	res    *http.Response
	err    error
}

// probe sends the first request to a repository. It returns the answer if that would be the same
// with a credential, and otherwise nil. In both cases what it has learned is known from then on.
// After an error, or an answer that says nothing, the registry is asked as if nobody had tried.
func (e *endpoint) probe(ctx context.Context, scopes []string, r request) *http.Response {
	c := e.client
	if r.method != http.MethodGet || !strings.HasPrefix(r.path, "manifests/") ||
		c.knows(e, scopes) {
		return nil
	}
	got := e.firstAnswer(ctx, r)
	if got.err != nil {
		return nil
	}
	var ping *http.Response
	switch got.res.StatusCode {
	case http.StatusOK:
		ping = &http.Response{StatusCode: http.StatusOK, Header: http.Header{}}
	case http.StatusNotFound: // what needs a credential may be hidden from who has none
		auth, err := authn.Resolve(ctx, c.keychain, e.repo)
		if err == nil && auth == authn.Anonymous {
			ping = &http.Response{StatusCode: http.StatusOK, Header: http.Header{}}
		}
	case http.StatusUnauthorized:
		ping = &http.Response{StatusCode: http.StatusUnauthorized,
			Header: http.Header{"Www-Authenticate": got.res.Header.Values("Www-Authenticate")}}
	}
	if ping != nil {
		told := &told{inner: e.guard(), scheme: got.scheme, host: e.repo.RegistryStr(), ping: ping}
		if _, err := e.authorizeBy(ctx, scopes, told); err == nil &&
			got.res.StatusCode != http.StatusUnauthorized {
			return got.res
		}
	}
	_ = got.res.Body.Close()
	return nil
}

// firstAnswer asks without a credential, with and without TLS where both may be.
func (e *endpoint) firstAnswer(ctx context.Context, r request) answer {
	schemes := []string{"https"}
	if !e.secure {
		schemes = append(schemes, "http")
	}
	answers := make(chan answer, len(schemes))
	for _, scheme := range schemes {
		go func() {
			res, err := e.askBy(ctx, scheme, r)
			answers <- answer{scheme, res, err}
		}()
	}
	var best answer
	var late <-chan time.Time
	for range schemes {
		select {
		case a := <-answers:
			switch {
			case a.err == nil && (best.res == nil || a.scheme == "https"):
				if best.res != nil {
					_ = best.res.Body.Close()
				}
				best = a
			case a.err == nil:
				_ = a.res.Body.Close()
			case best.res == nil:
				best = a
			}
		case <-late:
			go func() { // what comes now is too late
				if a := <-answers; a.err == nil {
					_ = a.res.Body.Close()
				}
			}()
			return best
		}
		if best.err == nil {
			if best.scheme == "https" && len(schemes) > 1 {
				late = closedTimer
			} else {
				late = time.After(tlsFirst)
			}
		}
	}
	return best
}

// closedTimer has always ended.
var closedTimer = func() <-chan time.Time {
	c := make(chan time.Time)
	close(c)
	return c
}()

// askBy sends a request without a credential.
func (e *endpoint) askBy(ctx context.Context, scheme string, r request) (*http.Response, error) {
	address := fmt.Sprintf("%s://%s/v2/%s/%s", scheme, e.repo.RegistryStr(),
		e.repo.RepositoryStr(), r.path)
	req, err := http.NewRequestWithContext(ctx, r.method, address, nil)
	if err != nil {
		return nil, err
	}
	for key, values := range r.header {
		req.Header[key] = values
	}
	client := &http.Client{Transport: e.guard(), CheckRedirect: func(*http.Request,
		[]*http.Request) error {
		return http.ErrUseLastResponse
	}}
	return client.Do(req)
}

// told is below what asks a registry how it wants to be asked, and has heard that already.
type told struct {
	inner  http.RoundTripper
	scheme string
	host   string
	ping   *http.Response
}

var errOtherScheme = errors.New("the registry has answered otherwise")

func (t *told) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Path != "/v2/" || req.URL.Host != t.host {
		return t.inner.RoundTrip(req)
	}
	if req.URL.Scheme != t.scheme {
		return nil, errOtherScheme
	}
	res := *t.ping
	res.Request, res.Body = req, io.NopCloser(bytes.NewReader(nil))
	return &res, nil
}

// knows reports whether it is known how to ask.
func (c *Client) knows(e *endpoint, scopes []string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready[e.key(scopes)] != nil
}

func (e *endpoint) key(scopes []string) string {
	return e.repo.Name() + " " + strings.Join(scopes, " ")
}

// guard is what everything that is sent for the registry goes through.
func (e *endpoint) guard() http.RoundTripper {
	return &guard{inner: e.client.base, secure: e.secure, agent: e.client.opt.UserAgent}
}

// authorizeBy asks the registry how it wants to be asked through rt, and remembers that.
func (e *endpoint) authorizeBy(
	ctx context.Context,
	scopes []string,
	rt http.RoundTripper,
) (*http.Client, error) {
	c := e.client
	auth, err := authn.Resolve(ctx, c.keychain, e.repo)
	if err != nil {
		return nil, permanent(err)
	}
	wrapped, err := transport.NewWithContext(ctx, e.repo.Registry, auth, rt, scopes)
	if err != nil {
		return nil, err
	}
	a := &http.Client{Transport: wrapped, CheckRedirect: checkRedirect}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready[e.key(scopes)] = a
	return a, nil
}
