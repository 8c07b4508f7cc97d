package transport

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// The first request to a registry is usually "/v2/", to learn with which kind of credential it
// wants to be asked. A manifest that is requested without a credential tells the same, and is
// usually needed next: that saves a round trip. A registry that may be used without TLS is asked in
// the usual way, because that also tells whether it is.

// probe sends the first request to a repository. It returns the answer if a credential would not
// change it, and otherwise nil. In both cases it remembers what it has learned. After an error, or
// an answer that tells nothing, the registry is asked as if there had been no probe.
func (e *endpoint) probe(ctx context.Context, scopes []string, r request) *http.Response {
	c := e.client
	if r.method != http.MethodGet || !strings.HasPrefix(r.path, "manifests/") || !e.secure ||
		c.knows(e, scopes) {
		return nil
	}
	res, err := e.bare(ctx, r)
	if err != nil {
		return nil
	}
	var ping *http.Response
	switch res.StatusCode {
	case http.StatusOK:
		ping = &http.Response{StatusCode: http.StatusOK, Header: http.Header{}}
	case http.StatusNotFound: // without a credential, existing content may look missing
		auth, err := authn.Resolve(ctx, c.keychain, e.repo)
		if err == nil && auth == authn.Anonymous {
			ping = &http.Response{StatusCode: http.StatusOK, Header: http.Header{}}
		}
	case http.StatusUnauthorized:
		ping = &http.Response{StatusCode: http.StatusUnauthorized,
			Header: http.Header{"Www-Authenticate": res.Header.Values("Www-Authenticate")}}
	}
	if ping != nil {
		told := &told{scheme: "https", host: e.repo.RegistryStr(), ping: ping}
		if _, err := e.authorizeBy(ctx, scopes, told); err == nil &&
			res.StatusCode != http.StatusUnauthorized {
			return res
		}
	}
	_ = res.Body.Close()
	return nil
}

// bare sends a request without a credential.
func (e *endpoint) bare(ctx context.Context, r request) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, r.method, e.address(r), nil)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, r.header)
	client := &http.Client{Transport: e.guard(false), CheckRedirect: func(*http.Request,
		[]*http.Request) error {
		return http.ErrUseLastResponse
	}}
	return client.Do(req)
}

// address is where a request goes, if that is by TLS.
func (e *endpoint) address(r request) string {
	return fmt.Sprintf("https://%s/v2/%s/%s", e.repo.RegistryStr(), e.repo.RepositoryStr(), r.path)
}

// told answers the ping ("GET /v2/") and the token requests of the library with answers that were
// received before. All other requests go to the registry.
type told struct {
	inner  http.RoundTripper // for everything else
	scheme string
	host   string
	ping   *http.Response
	tokens *tokenServer // nil: there is none
}

var errOtherScheme = errors.New("the registry has answered in another way than before")

func (t *told) RoundTrip(req *http.Request) (*http.Response, error) {
	switch {
	case t.tokens != nil && req.URL.Host == tokenHost:
		return t.tokens.ask(req)
	case req.URL.Path != "/v2/" || req.URL.Host != t.host:
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

// guard is the transport for everything that is sent to the registry. If unverified is set, it goes
// on where a certificate is not valid.
func (e *endpoint) guard(unverified bool) *guard {
	c, host := e.client, e.repo.RegistryStr()
	body := c.opt.Idle
	if e.mirror {
		body = min(body, c.opt.Turn)
	}
	return &guard{client: c, secure: e.secure, near: e.web == nil && e.near(),
		unverified: unverified && !e.secure,
		base:       c.base, agent: c.opt.UserAgent, idle: c.opt.Idle, body: body,
		answered: func() { c.answered.Store(host, true) }}
}

// silent reports whether the registry has answered no request yet.
func (e *endpoint) silent() bool {
	_, ok := e.client.answered.Load(e.repo.RegistryStr())
	return !ok
}

// authorizeBy asks the registry how it wants to be asked, unless that is known, and remembers it.
func (e *endpoint) authorizeBy(
	ctx context.Context,
	scopes []string,
	known *told, // nil: it is not known
) (*http.Client, error) {
	c := e.client
	ctx, cancel := context.WithTimeout(ctx, c.opt.Idle)
	defer cancel()
	auth, err := authn.Resolve(ctx, c.keychain, e.repo)
	if err != nil {
		return nil, permanent(err)
	}
	asks, err := e.asks(ctx, known)
	if err != nil {
		return nil, err
	}
	answer, err := e.answerTo(asks)
	if err != nil {
		return nil, err
	}
	wrapped, err := transport.NewWithContext(ctx, e.repo.Registry, auth, answer, scopes)
	if err != nil {
		return nil, err
	}
	a := &http.Client{Transport: wrapped, CheckRedirect: checkRedirect}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready[e.key(scopes)] = a
	return a, nil
}
