package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"kubevirt.io/disk/volume/api"
)

// Options say which server to ask, and how. Server is required.
type Options struct {
	Server string // as https://HOST:8443
	// TokenFile has the token to show. It is read for each request.
	TokenFile string
	// CertFile and KeyFile are the client's certificate (PEM). They are read for each connection.
	CertFile, KeyFile string
	// CAFile has the certificates (PEM) of the authorities for the server's certificate, instead of
	// the system's.
	CAFile string
	// UserAgent is the name of the calling program.
	UserAgent string
}

// Client asks one server.
type Client struct {
	opt  Options
	base *url.URL
	http *http.Client
}

// New makes a client. It sends nothing yet.
func New(opt Options) (*Client, error) {
	base, err := url.Parse(opt.Server)
	if err != nil || base.Host == "" || base.Scheme != "https" && base.Scheme != "http" {
		return nil, fmt.Errorf("%q is not an address of a server: write it as https://HOST:8443",
			opt.Server)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if opt.CAFile != "" {
		text, err := os.ReadFile(opt.CAFile)
		if err != nil {
			return nil, fmt.Errorf("the certificates of the server's authorities: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%q has no certificate (PEM)", opt.CAFile)
		}
	}
	if opt.CertFile != "" {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, err := tls.LoadX509KeyPair(opt.CertFile, opt.KeyFile)
			return &cert, err
		}
	}
	transport := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		TLSClientConfig:       config,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   10 * time.Second,
		IdleConnTimeout:       time.Minute,
		ExpectContinueTimeout: time.Second,
	}
	return &Client{opt: opt, base: base, http: &http.Client{Transport: transport,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return errors.New("the server redirects; a volumes server never does: check its " +
				"address")
		}}}, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Put makes a volume, or returns the existing one if it is as asked. A larger size enlarges it.
func (c *Client) Put(ctx context.Context, name string, spec api.Spec) (api.Volume, error) {
	var v api.Volume
	err := c.call(ctx, http.MethodPut, "/volume/"+url.PathEscape(name), spec, &v)
	return v, err
}

// The pause between two requests about a volume that gets its image. It doubles each time.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
)

// Provide makes a volume, or finds it as requested, and waits until its disk can be used: an image
// may have to be fetched first. Call it to start a machine whose disk is made for it. It ends with
// ctx, and with an *api.Error if the volume cannot be made. A volume that awaits an upload is
// returned as it is.
func (c *Client) Provide(ctx context.Context, name string, spec api.Spec) (api.Volume, error) {
	v, err := c.Put(ctx, name, spec)
	for pause := firstPause; err == nil && v.Info.State == api.StateFilling; {
		select {
		case <-time.After(pause):
			v, err = c.Get(ctx, name)
		case <-ctx.Done():
		}
		if ctx.Err() != nil { // possibly during the request
			return v, fmt.Errorf("volume %q gets its image: %w", name, context.Cause(ctx))
		}
		pause = min(2*pause, lastPause)
	}
	if err == nil && v.Info.State == api.StateFailed {
		err = api.Errorf(api.CodeFailed, "volume %q: %s", name, v.Info.Failure)
	}
	return v, err
}

// Get returns a volume.
func (c *Client) Get(ctx context.Context, name string) (api.Volume, error) {
	var v api.Volume
	err := c.call(ctx, http.MethodGet, "/volume/"+url.PathEscape(name), nil, &v)
	return v, err
}

// List returns all volumes, by name.
func (c *Client) List(ctx context.Context) ([]api.Volume, error) {
	var all api.List
	err := c.call(ctx, http.MethodGet, "/volumes", nil, &all)
	return all.Volumes, err
}

// Delete removes a volume and its data, if there is one. With force it fences its users first.
func (c *Client) Delete(ctx context.Context, name string, force bool) error {
	path := "/volume/" + url.PathEscape(name)
	if force {
		path += "?force=true"
	}
	return c.call(ctx, http.MethodDelete, path, nil, nil)
}

// Do sends a request for a path of the server, such as /volume/NAME/data, with the client's token
// or certificate. The caller closes the body of the answer, which may be a refusal: see Refusal.
func (c *Client) Do(r *http.Request, path string) (*http.Response, error) {
	target, err := c.base.Parse(strings.TrimSuffix(c.base.Path, "/") + path)
	if err != nil {
		return nil, err
	}
	if target.Scheme != c.base.Scheme || target.Host != c.base.Host { // of a Location
		return nil, fmt.Errorf("%s names an address at another server, %s://%s, which must not "+
			"get the token: check the proxies in front of the server", c.base.Host, target.Scheme,
			target.Host)
	}
	r.URL, r.Host = target, ""
	if c.opt.TokenFile != "" {
		token, err := os.ReadFile(c.opt.TokenFile)
		if named, ok := errors.AsType[*fs.PathError](err); ok {
			err = named.Err // the name may be the token, by mistake
		}
		if err != nil {
			return nil, fmt.Errorf("the file of the token cannot be read: %w", err)
		}
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	if c.opt.UserAgent != "" {
		r.Header.Set("User-Agent", c.opt.UserAgent)
	}
	return c.http.Do(r)
}

// maxAnswer bounds an answer: some hundred bytes for each of 16,000 volumes.
const maxAnswer = 32 << 20

// call makes a request and decodes the answer.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.base.String(), body)
	if err != nil {
		return err
	}
	r.Header.Set("Accept", "application/json")
	if in != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	answer, err := c.Do(r, path)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if err := Refusal(answer); err != nil {
		return err
	}
	want := []int{http.StatusOK, http.StatusCreated, http.StatusAccepted}
	if out == nil {
		want = []int{http.StatusNoContent}
	}
	if !slices.Contains(want, answer.StatusCode) { // what was asked for may not be done
		return fmt.Errorf("%s answers %s, which no volumes server does: check the address, and "+
			"the proxies in front of it", c.base.Host, answer.Status)
	}
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("the answer of %s cannot be understood: %w", c.base.Host, err)
	}
	return nil
}

// Refusal returns the *api.Error of an answer that is a refusal, and nil for any other.
func Refusal(answer *http.Response) error {
	if answer.StatusCode < 400 {
		return nil
	}
	refused := &api.Error{}
	text, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err != nil || json.Unmarshal(text, refused) != nil || refused.Message == "" {
		refused = &api.Error{Message: fmt.Sprintf("the server answers %s", answer.Status)}
	}
	refused.Status = answer.StatusCode
	return refused
}
