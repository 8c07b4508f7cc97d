package transport

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"kubevirt.io/disk/internal/loopback"
	"kubevirt.io/disk/registry/internal/bounded"
)

// asks finds out how the registry authenticates. It tries TLS with a valid certificate first, then
// plain HTTP, and then TLS with another certificate, if the user has allowed these. A registry on
// this machine needs no permission for plain HTTP, but it is not tried after a wrong certificate.
func (e *endpoint) asks(ctx context.Context) (*transport.Challenge, error) {
	first := e.guard(false)
	near := e.secure && first.near
	first.near = false
	asks, err := transport.Ping(ctx, e.repo.Registry, first)
	var certificate *tls.CertificateVerificationError
	if near && err != nil && !errors.As(err, &certificate) { // the registry may answer without TLS
		return transport.Ping(ctx, e.repo.Registry, e.guard(false))
	}
	if !e.secure && errors.As(err, &certificate) {
		return transport.Ping(ctx, e.repo.Registry, e.guard(true))
	}
	return asks, err
}

// answerTo is the transport for a registry that authenticates in that way.
func (e *endpoint) answerTo(asks *transport.Challenge) (*told, error) {
	answer := &told{inner: e.guard(true), scheme: "https", host: e.repo.RegistryStr(),
		ping: &http.Response{StatusCode: http.StatusOK, Header: http.Header{}}}
	if asks.Insecure {
		answer.scheme = "http"
	}
	if !strings.EqualFold(asks.Scheme, "bearer") {
		return answer, nil
	}
	at, err := url.Parse(asks.Parameters["realm"])
	if err != nil || at.Host == "" {
		return nil, permanent(fmt.Errorf("%s wants a token, and does not say from which address",
			answer.host))
	}
	// Both are on this machine, and the registry answers without TLS.
	here := asks.Insecure && e.near() && loopback.Is(at.Hostname())
	if err := e.mayAsk(at); err != nil && !here {
		return nil, err
	}
	at.User = nil
	through := e.guard(true)
	if e.secure && !here {
		through.base = e.client.tokens
	}
	answer.tokens = &tokenServer{at: at, realm: asks.Parameters["realm"], registry: answer.host,
		client: &http.Client{Transport: through, CheckRedirect: e.mayMove}}
	quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	answer.ping.StatusCode = http.StatusUnauthorized
	answer.ping.Header.Set("Www-Authenticate", fmt.Sprintf(`Bearer realm="%s",service="%s"`,
		quote.Replace("https://"+tokenHost+"/?"+at.RawQuery),
		quote.Replace(asks.Parameters["service"])))
	return answer, nil
}

// told answers the library's ping ("GET /v2/") with the known challenge, and its token requests.
// All other requests go to the registry.
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
	case req.URL.Host != t.host:
		res, err := t.inner.RoundTrip(req)
		if err == nil {
			t.ownTokens(res.Header)
		}
		return res, err
	case req.URL.Path != "/v2/":
		return t.inner.RoundTrip(req)
	}
	if req.URL.Scheme != t.scheme {
		return nil, errOtherScheme
	}
	res := *t.ping
	res.Request, res.Body = req, io.NopCloser(bytes.NewReader(nil))
	return &res, nil
}

// ownTokens handles a challenge of a host that the registry redirects to. The challenge stays only
// if it names the token server of the registry, as another name of the same registry would.
// Otherwise the library would fetch a token from whatever address this host names, and send it
// here: mayAsk would not be called.
func (t *told) ownTokens(answer http.Header) {
	challenge := answer.Get("Www-Authenticate")
	answer.Del("Www-Authenticate")
	if t.tokens == nil || !strings.Contains(challenge, `realm="`+t.tokens.realm+`"`) {
		return
	}
	_, scope, _ := strings.Cut(challenge, `scope="`)
	scope, _, _ = strings.Cut(scope, `"`)
	answer.Set("Www-Authenticate",
		fmt.Sprintf(`%s,scope="%s"`, t.ping.Header.Get("Www-Authenticate"), scope))
}

// mayMove decides whether a redirect of a token server is followed. A credential is only sent to
// the address that the registry has named: not to another port, nor to a name below it.
func (e *endpoint) mayMove(req *http.Request, via []*http.Request) error {
	if err := checkRedirect(req, via); err != nil {
		return err
	}
	from, to := via[0], req.URL
	secret := from.Header.Get("Authorization") != "" || from.Method != http.MethodGet
	if secret && (from.URL.Scheme != to.Scheme || hostOf(from.URL) != hostOf(to)) {
		return permanent(fmt.Errorf("the token server of %s, %s, redirects to %s, and the "+
			"credential must not go there: its administrator has to name the right address",
			e.repo.RegistryStr(), from.URL.Host, to.Host))
	}
	return e.mayAsk(to)
}

// mayAsk checks the address of a token server. It gets the credential, and a registry that was
// taken over could name a service inside of our network.
func (e *endpoint) mayAsk(at *url.URL) error {
	host := e.repo.RegistryStr()
	what := ""
	switch {
	case at.Scheme != "https" && at.Scheme != "http":
		return permanent(fmt.Errorf("%s wants a token from %q, which is no address of a token "+
			"server", host, at.Scheme+"://"+at.Host))
	case !e.secure:
		return nil
	case at.Scheme == "http":
		what = "without TLS"
	case at.Host != host && isPrivate(at.Hostname()):
		what = "a private address"
	default:
		return nil
	}
	return permanent(fmt.Errorf("%s wants a token from %s, %s: if that is intended, name %s with "+
		"--insecure-registry", host, at.Host, what, host))
}

// isPrivate reports whether a host is this machine, or an address that is not public. An address in
// an unusual notation, like 127.1 or 0x7f000001, counts as private: nobody needs it. For other
// names, tokenTransport checks where they lead.
func isPrivate(host string) bool {
	if a, err := netip.ParseAddr(host); err == nil {
		return distanceOf(a) != public
	}
	last := strings.ToLower(strings.TrimSuffix(host, "."))
	if last == "localhost" || strings.HasSuffix(last, ".localhost") {
		return true
	}
	_, err := strconv.ParseUint(last[strings.LastIndexByte(last, '.')+1:], 0, 64)
	return err == nil
}

// tokenHost stands for the token server where the library has to name it. The library itself
// refuses private addresses, also if the user has allowed them.
const tokenHost = "token-server.invalid"

// maxToken bounds the answer of a token server, in bytes.
const maxToken = 64 << 10

// tokenServer issues a registry's tokens.
type tokenServer struct {
	at       *url.URL
	realm    string // its address, as the registry has written it
	registry string // the registry that has named it
	client   *http.Client
}

// tokenError is a failure of the token server. Its text has the real address.
type tokenError struct{ err error }

func (e *tokenError) Error() string { return e.err.Error() }
func (e *tokenError) Unwrap() error { return e.err }

// maxScopes bounds a request to a token server, in bytes. The library asks for every scope that the
// registry has ever named, and a hostile one may name another each time.
const maxScopes = 64 << 10

// ask sends the library's request to the token server. No error repeats the answer, which may have
// secrets.
func (t *tokenServer) ask(in *http.Request) (*http.Response, error) {
	if int64(len(in.URL.RawQuery))+in.ContentLength > maxScopes { // the next one begins with none
		return nil, &tokenError{&StatusError{Host: t.registry, Status: http.StatusUnauthorized,
			Detail: "it names ever more scopes that a token must have"}}
	}
	of := &tokensOf{registry: t.registry}
	req, at := in.Clone(context.WithValue(in.Context(), tokensOfKey{}, of)), *t.at
	at.RawQuery = strings.ReplaceAll(in.URL.RawQuery, "+", "%20") // the library's blank is +
	req.URL, req.Host = &at, at.Host
	res, err := t.client.Do(req)
	if err != nil {
		return nil, &tokenError{withoutQuery(err)}
	}
	if res.StatusCode != http.StatusOK {
		return res, nil
	}
	content, err := bounded.Read(res.Body, maxToken)
	res.Body.Close()
	if err != nil {
		return nil, &tokenError{fmt.Errorf("asking %s for a token: %w", at.Host, err)}
	}
	var answer struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
	}
	if json.Unmarshal(content, &answer) != nil || answer.Token+answer.AccessToken == "" {
		return nil, &tokenError{permanent(fmt.Errorf("the token server %s answers without a "+
			"token: check that it is one", at.Host))}
	}
	res.Body = io.NopCloser(bytes.NewReader(content))
	return res, nil
}
