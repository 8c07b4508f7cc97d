package registry

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

const (
	registryUser     = "me"
	registryPassword = "pa55word"
	// registryHash is the password's bcrypt hash, as docker-registry needs it.
	registryHash = "$2y$05$abcdefghijklmnopqrstuur.ZxEKly2fYX6K.hrvYXsoEaKgtr95a"
)

// basicAuth returns the settings of a registry with a password.
func basicAuth(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "htpasswd")
	require.NoError(t, os.WriteFile(file, []byte(registryUser+":"+registryHash+"\n"), 0o600))
	return fmt.Sprintf("auth: {htpasswd: {realm: test, path: %q}}\n", file)
}

// tokenAuth starts a server that issues tokens for the password, and returns the settings of a
// registry that requires these tokens (distribution, docs/spec/auth/jwt.md).
func tokenAuth(t *testing.T) (settings string, issued func() int) {
	t.Helper()
	bundle := filepath.Join(t.TempDir(), "bundle.pem")
	own := rig.MakeCertificate(t, bundle, bundle+".key")
	certificate, key := own.Certificate[0], own.PrivateKey.(*ecdsa.PrivateKey)
	var mu sync.Mutex
	n := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != registryUser ||
			password != registryPassword {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		mu.Lock()
		n++
		mu.Unlock()
		var access []map[string]any
		for _, scope := range r.URL.Query()["scope"] {
			if parts := strings.SplitN(scope, ":", 3); len(parts) == 3 {
				access = append(
					access,
					map[string]any{
						"type":    parts[0],
						"name":    parts[1],
						"actions": strings.Split(parts[2], ","),
					},
				)
			}
		}
		now := time.Now().Unix()
		encode := func(v any) string {
			text, err := json.Marshal(v)
			if err != nil {
				panic(err)
			}
			return base64.RawURLEncoding.EncodeToString(text)
		}
		signed := encode(
			map[string]any{
				"typ": "JWT",
				"alg": "ES256",
				"x5c": []string{base64.StdEncoding.EncodeToString(certificate)},
			},
		) +
			"." + encode(
			map[string]any{
				"iss":    "test",
				"sub":    registryUser,
				"aud":    r.URL.Query().Get("service"),
				"exp":    now + 60,
				"nbf":    now - 60,
				"iat":    now,
				"jti":    fmt.Sprint(n),
				"access": access,
			},
		)
		sum := sha256.Sum256([]byte(signed))
		a, b, err := ecdsa.Sign(rand.Reader, key, sum[:])
		if err != nil {
			panic(err)
		}
		signature := append(a.FillBytes(make([]byte, 32)), b.FillBytes(make([]byte, 32))...)
		_ = json.NewEncoder(w).
			Encode(map[string]any{"token": signed + "." +
				base64.RawURLEncoding.EncodeToString(signature), "expires_in": 60})
	}))
	t.Cleanup(server.Close)
	realm := strings.Replace(server.URL, "127.0.0.1", "localhost", 1) + "/token"
	return fmt.Sprintf(
			"auth: {token: {realm: %q, service: test, issuer: test, rootcertbundle: %q}}\n",
			realm,
			bundle,
		),
		func() int { mu.Lock(); defer mu.Unlock(); return n }
}

// lyingProxy is a proxy before a registry. It treats blobs as bad networks, gateways and storage
// do.
type lyingProxy struct {
	address string

	mu        sync.Mutex
	delay     time.Duration
	cutAfter  int64 // bytes of each answer, until cuts are used up
	cuts      int
	busy      int  // answers 429
	redirects bool // blobs are at an address that is valid for one request
	flip      bool // one wrong bit in each blob
	signed    int
	good      map[string]bool
}

func newLyingProxy(t *testing.T, registry string) *lyingProxy {
	p := &lyingProxy{good: map[string]bool{}}
	target := &url.URL{Scheme: "http", Host: registry}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host
	}, ModifyResponse: p.change,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request,
			_ error) {
			panic(http.ErrAbortHandler)
		}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.answer(w, r) {
			return
		}
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p.address = strings.TrimPrefix(server.URL, "http://")
	return p
}

// flipping sets whether the proxy flips bits.
func (p *lyingProxy) flipping(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flip = on
}

// answer handles a request before the registry gets it. It reports whether it has answered.
func (p *lyingProxy) answer(w http.ResponseWriter, r *http.Request) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	time.Sleep(p.delay)
	if p.busy > 0 && r.URL.Path != "/v2/" {
		p.busy--
		w.Header().Set("Retry-After", "0")
		w.WriteHeader(http.StatusTooManyRequests)
		return true
	}
	if !p.redirects || !strings.Contains(r.URL.Path, "/blobs/sha256:") ||
		r.Method != http.MethodGet {
		return false
	}
	if signature := r.URL.Query().Get("signature"); signature != "" {
		if !p.good[signature] {
			w.WriteHeader(http.StatusForbidden)
			return true
		}
		delete(p.good, signature)
		return false
	}
	p.signed++
	signature := fmt.Sprint(p.signed)
	p.good[signature] = p.signed%3 != 1 // some expire before they are used
	http.Redirect(
		w,
		r,
		"http://"+p.address+r.URL.Path+"?signature="+signature,
		http.StatusTemporaryRedirect,
	)
	return true
}

// change changes an answer.
func (p *lyingProxy) change(res *http.Response) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !strings.Contains(res.Request.URL.Path, "/blobs/sha256:") ||
		res.Request.Method != http.MethodGet ||
		res.StatusCode >= 300 {
		return nil
	}
	if p.cuts > 0 && res.ContentLength > p.cutAfter {
		p.cuts--
		res.Body = &cutBody{res.Body, p.cutAfter}
	}
	if p.flip && res.ContentLength > 10000 {
		res.Body = &flippedBody{ReadCloser: res.Body, at: res.ContentLength / 2}
	}
	return nil
}

// cutBody ends too early.
type cutBody struct {
	io.ReadCloser
	left int64
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// flippedBody has one wrong bit.
type flippedBody struct {
	io.ReadCloser
	at int64
}

func (b *flippedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.at >= 0 && b.at < int64(n) {
		p[b.at] ^= 1
	}
	b.at -= int64(n)
	return n, err
}
