package transport

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"kubevirt.io/disk/internal/loopback"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/keychain"
)

// Options say how registries are reached. The zero value works for public ones.
type Options struct {
	// Config is a file of credentials, or a directory with one: docker's config.json, or a mounted
	// pull secret. "": the places of docker, podman and the kubelet.
	Config string
	// Own is a credential for the registry OwnHost. It wins over those of Config. Zero: none.
	Own     keychain.Credential
	OwnHost string
	// CA is a file of certificates (PEM) that are trusted in addition to the system's.
	CA string
	// Mirrors are HOST=MIRROR[/PREFIX]. They are asked before HOST, in that order.
	Mirrors []string
	// Insecure are the registries, by name and port, that may be used without TLS, or by TLS with a
	// certificate that is not valid. Their token servers may have private addresses.
	Insecure []string
	// Timeout is how long a registry may send nothing before the request fails. 0: two minutes.
	Timeout time.Duration
	// FirstTimeout is the same for a registry that has not answered one request of this client: its
	// name may be wrong. 0: as Timeout.
	FirstTimeout time.Duration
	// Idle is how long a connection may bring nothing before another one is made, and how long an
	// answer other than a blob may take as a whole. 0: a minute.
	Idle time.Duration
	// Turn is how long an endpoint that sends nothing is asked while there are others. 0: ten
	// seconds. It is never more than Timeout.
	Turn time.Duration
	// UserAgent is the name of this program in requests.
	UserAgent string
	// Checksums is the file with the digests of files at addresses that have none: a file next to
	// them, such as SHA256SUMS, or an address. "": there is none.
	Checksums string
	// Gate decides which images may be read. nil: all may.
	Gate Gate
	// Warn is called with messages that a person may want to see, for example that a request is
	// tried again. May be nil.
	Warn func(text string)
	// Failed is called when something has failed and is tried again, with the registry (HOST or
	// HOST:PORT) or the reference. Warn is called, too. May be nil.
	Failed func(of string, err error)
}

// Reads is how many requests for ranges of blobs are worth having under way at once.
const Reads = 16

const (
	defaultTimeout = 2 * time.Minute
	defaultIdle    = time.Minute
	maxRedirects   = 10
	defaultTurn    = 10 * time.Second
	// maxHeader is how long the header of an answer may be, in bytes. Signed addresses have a few
	// thousand.
	maxHeader = 256 << 10
)

// Client reaches registries. Any number of goroutines may use it.
type Client struct {
	opt      Options
	keychain *keychain.Keychain
	base     *http.Transport
	open     *http.Transport // the same, without verifying certificates
	tokens   *http.Transport // for token servers of registries with TLS
	mirrors  []mirror
	answered sync.Map // the registries and mirrors that have answered a request; host to true
	invalid  sync.Map // hosts whose certificates are not valid, and need not be; host to true

	mu    sync.Mutex
	ready map[string]*http.Client // guarded by mu; by repository and scope
}

type mirror struct {
	registry string // host of the registry that this is a mirror of
	host     string
	prefix   string // of the repository there
}

// quoted is a wrong setting in a message, unless a password may precede an @ in it.
func quoted(text string) string {
	if strings.Contains(text, "@") {
		return "(not shown: credentials are no part of it)"
	}
	return strconv.Quote(text)
}

// New checks the options and reads the certificates. It sends nothing yet.
func New(opt Options) (*Client, error) {
	if err := checkProxies(); err != nil {
		return nil, err
	}
	opt.Timeout = cmp.Or(max(opt.Timeout, 0), defaultTimeout)
	opt.FirstTimeout = cmp.Or(max(opt.FirstTimeout, 0), opt.Timeout)
	opt.Idle = cmp.Or(max(opt.Idle, 0), defaultIdle)
	opt.Turn = min(cmp.Or(max(opt.Turn, 0), defaultTurn), opt.Timeout)
	if opt.Warn == nil {
		opt.Warn = func(string) {}
	}
	opt.UserAgent = cmp.Or(opt.UserAgent, "kubevirt-disk")
	c := &Client{opt: opt, ready: make(map[string]*http.Client),
		keychain: &keychain.Keychain{File: opt.Config, Own: opt.Own, Host: opt.OwnHost,
			Warn: opt.Warn}}
	if err := c.keychain.Check(); err != nil {
		return nil, fmt.Errorf("--registry-config (REGISTRY_CONFIG): %w", err)
	}
	for _, host := range opt.Insecure {
		if _, err := name.NewRegistry(host); err != nil || strings.Contains(host, "/") {
			return nil, fmt.Errorf("--insecure-registry (INSECURE_REGISTRY): %s is not a host, or "+
				"host and port", quoted(host))
		}
	}
	for _, text := range opt.Mirrors {
		of, to, ok := strings.Cut(text, "=")
		host, prefix, _ := strings.Cut(to, "/")
		registry, err := name.NewRegistry(of)
		_, err2 := name.NewRegistry(host)
		if !ok || of == "" || host == "" || err != nil || err2 != nil {
			return nil, fmt.Errorf("--registry-mirror (REGISTRY_MIRROR): %s is not of the form "+
				"HOST=MIRROR or HOST=MIRROR/PREFIX", quoted(text))
		}
		c.mirrors = append(c.mirrors,
			mirror{registry: registry.RegistryStr(), host: host, prefix: strings.Trim(prefix, "/")})
	}
	dialer := &net.Dialer{Timeout: 20 * time.Second, KeepAlive: 30 * time.Second}
	c.base = &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		OnProxyConnectResponse: proxyAnswer,
		DialContext:            dialer.DialContext,
		TLSHandshakeTimeout:    20 * time.Second,
		IdleConnTimeout:        60 * time.Second,
		MaxIdleConnsPerHost:    Reads, // each with a connection of its own
		DisableCompression:     true,  // blobs are stored in their own form
		MaxResponseHeaderBytes: maxHeader,
		// Several connections are faster than several streams of one.
		ForceAttemptHTTP2: false,
		TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS12},
	}
	if opt.CA != "" {
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		content, err := osfile.ReadText(opt.CA)
		if err != nil {
			return nil, fmt.Errorf("--registry-ca (REGISTRY_CA): %w", err)
		}
		if !pool.AppendCertsFromPEM(content) {
			return nil, fmt.Errorf("--registry-ca (REGISTRY_CA): %q has no certificate in PEM",
				opt.CA)
		}
		c.base.TLSClientConfig.RootCAs = pool
	}
	c.tokens = tokenTransport(c.base, *dialer)
	c.open = c.base.Clone()
	c.open.TLSClientConfig.InsecureSkipVerify = true
	return c, nil
}

// Warn tells a person something.
func (c *Client) Warn(text string) { c.opt.Warn(text) }

// Gated reports whether a Gate decides which images may be read.
func (c *Client) Gated() bool { return c.opt.Gate != nil }

// Close ends idle connections.
func (c *Client) Close() {
	c.base.CloseIdleConnections()
	c.open.CloseIdleConnections()
	c.tokens.CloseIdleConnections()
}

// endpoint is a repository at one registry or mirror.
type endpoint struct {
	client *Client
	repo   name.Repository
	mirror bool
	secure bool
	web    *webFile // a file at an address; nil: this is a repository
	// failed is how many requests for parts have failed with an error of the server, in a row.
	failed atomic.Int32
	parts  sync.Map // the paths of which it has sent a part; path to true
}

// endpoints returns where to ask for a repository, mirrors first.
func (c *Client) endpoints(repo name.Repository, mirrors bool) ([]*endpoint, error) {
	var all []*endpoint
	if mirrors {
		for _, m := range c.mirrors {
			if m.registry != repo.RegistryStr() {
				continue
			}
			e, err := c.endpoint(m.host, joinPath(m.prefix, repo.RepositoryStr()))
			if err != nil {
				return nil, err
			}
			e.mirror = true
			all = append(all, e)
		}
	}
	e, err := c.endpoint(repo.RegistryStr(), repo.RepositoryStr())
	if err != nil {
		return nil, err
	}
	return append(all, e), nil
}

// near reports whether the registry is on this machine, so that nobody can listen in between.
func (e *endpoint) near() bool {
	host := e.repo.RegistryStr()
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return loopback.Is(strings.Trim(host, "[]"))
}

func joinPath(prefix, repository string) string {
	if prefix == "" {
		return repository
	}
	return prefix + "/" + repository
}

func (c *Client) endpoint(host, repository string) (*endpoint, error) {
	insecure := slices.Contains(c.opt.Insecure, host)
	var opts []name.Option
	if insecure {
		opts = append(opts, name.Insecure)
	}
	repo, err := name.NewRepository(host+"/"+repository, opts...)
	if err != nil {
		return nil, err
	}
	return &endpoint{client: c, repo: repo, secure: !insecure}, nil
}

// authorize asks the registry how it authenticates, once for each repository and scope.
func (e *endpoint) authorize(ctx context.Context, scopes []string) (*http.Client, error) {
	c := e.client
	c.mu.Lock()
	found := c.ready[e.key(scopes)]
	c.mu.Unlock()
	if found != nil {
		return found, nil
	}
	ctx, cancel := e.within(ctx)
	defer cancel()
	auth, err := authn.Resolve(ctx, c.keychain, e.repo)
	if err != nil {
		return nil, permanent(err)
	}
	asks, err := e.asks(ctx)
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

func (e *endpoint) key(scopes []string) string {
	return e.repo.Name() + " " + strings.Join(scopes, " ")
}

// guard is the transport for all requests to the registry. With unverified, it goes on although a
// certificate is not valid.
func (e *endpoint) guard(unverified bool) *guard {
	c, host := e.client, e.repo.RegistryStr()
	body := c.opt.Idle
	if e.mirror {
		body = min(body, c.opt.Turn)
	}
	return &guard{client: c, host: host, secure: e.secure, near: e.web == nil && e.near(),
		unverified: unverified && !e.secure,
		base:       c.base, agent: c.opt.UserAgent, idle: c.opt.Idle, body: body,
		answered: func() { c.answered.Store(host, true) }}
}

// silent reports whether the registry has answered no request yet.
func (e *endpoint) silent() bool {
	_, ok := e.client.answered.Load(e.repo.RegistryStr())
	return !ok
}

// address is where a request goes, if that is by TLS.
func (e *endpoint) address(r request) string {
	return fmt.Sprintf("https://%s/v2/%s/%s", e.repo.RegistryStr(), e.repo.RepositoryStr(), r.path)
}

// forget makes the next request authenticate again, with the credential looked up again.
func (e *endpoint) forget() {
	c := e.client
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.ready, func(key string, _ *http.Client) bool {
		return strings.HasPrefix(key, e.key(nil))
	})
}

func checkRedirect(req *http.Request, via []*http.Request) error {
	tidy(req.URL)
	req.Header.Del("Referer") // its query may be a signature
	if len(via) >= maxRedirects {
		return permanent(fmt.Errorf("stopped after %d redirects", maxRedirects))
	}
	return nil
}

// guard sees every request to one registry, and watches its answer. Nothing is sent without TLS
// unless the user has allowed that for this registry, or it stays on this machine.
type guard struct {
	client *Client
	host   string // of the registry
	secure bool
	near   bool // it is on this machine
	// unverified: go on with a certificate that is not valid
	unverified bool
	base       http.RoundTripper // that verifies certificates

	agent    string
	idle     time.Duration // until the answer begins
	body     time.Duration // until it has ended
	answered func()
}

func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	if g.secure && req.URL.Scheme != "https" && !(g.near && loopback.Is(req.URL.Hostname())) {
		return nil, permanent(fmt.Errorf("%s would be asked without TLS: if that is intended, "+
			"name %s with --insecure-registry", req.URL.Host, g.host))
	}
	x := begin(req.Context(), g.idle)
	req = req.Clone(x.ctx)
	req.Header.Set("User-Agent", g.agent)
	if req.Body != nil && req.Body != http.NoBody {
		body := req.Body
		if req.GetBody != nil { // the library repeats a request with a token, and rewinds nothing
			var err error
			if body, err = req.GetBody(); err != nil {
				x.end()
				return nil, err
			}
		}
		req.Body = &sentBody{body, x.timer, g.idle}
	}
	res, err := g.send(req)
	if err == nil {
		if err = checkLocation(res, req.URL); err != nil {
			_ = res.Body.Close()
		}
	}
	if err != nil {
		err = withoutSecrets(x.explain(err), req)
		x.end()
		if req.URL.Scheme == "http" {
			err = &plainError{err}
		}
		return nil, err
	}
	g.answered()
	if pause := res.Header.Get(retryHeader); pause != "" {
		req.Header.Set(retryHeader, pause) // an error of the library shows the request only
	}
	x.answered(res, g.body)
	return res, nil
}

// plainError is what has failed of a request without TLS, which may go out.
type plainError struct{ error }

func (e *plainError) Unwrap() error { return e.error }

// send sends a request. It verifies certificates first, also where they need not be valid.
func (g *guard) send(req *http.Request) (*http.Response, error) {
	c := g.client
	if _, known := c.invalid.Load(req.URL.Host); known && g.unverified {
		return c.open.RoundTrip(req)
	}
	res, err := g.base.RoundTrip(req)
	if !g.unverified || !errors.As(err, new(*tls.CertificateVerificationError)) {
		return res, err
	}
	if sent, ok := req.Body.(*sentBody); ok && req.GetBody != nil { // it was closed, not sent
		again, err := req.GetBody()
		if err != nil {
			return nil, err
		}
		req.Body = &sentBody{again, sent.timer, sent.idle}
	}
	if _, known := c.invalid.Swap(req.URL.Host, true); !known {
		c.opt.Warn(fmt.Sprintf("%s: %v; it is used nevertheless, because of --insecure-registry",
			req.URL.Host, err))
	}
	return c.open.RoundTrip(req)
}

// checkProxies refuses proxy settings that net/http would ignore, so that a registry is not asked
// without the proxy. The error does not show the value, which may have a password.
func checkProxies() error {
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"} {
		value := os.Getenv(name)
		if value == "" {
			continue
		}
		if !strings.Contains(value, "://") {
			value = "http://" + value // as net/http does
		}
		if u, err := url.Parse(value); err != nil || u.Hostname() == "" {
			return fmt.Errorf("%s is not the address of a proxy: write it as "+
				"http://USER:PASSWORD@HOST:PORT, and special characters of the password as %%23",
				name)
		}
	}
	return nil
}

// proxyAnswer explains the answer of a proxy that did not reach a registry. net/http's error would
// have only the text of the status, as if it came from the registry.
func proxyAnswer(_ context.Context, proxy *url.URL, req *http.Request, res *http.Response) error {
	if res.StatusCode == http.StatusOK {
		return nil
	}
	err := fmt.Errorf("the proxy %s does not connect to %s: it answers %s", proxy.Host,
		req.Host, res.Status)
	switch {
	case res.StatusCode == http.StatusProxyAuthRequired:
		return permanent(fmt.Errorf("%w; name its user and password in HTTPS_PROXY, as "+
			"http://USER:PASSWORD@HOST:PORT", err))
	case res.StatusCode < http.StatusInternalServerError:
		return permanent(err)
	}
	return err
}
