package registry

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

const (
	proxyUser     = "someone"
	proxyPassword = "pr0xy-pa55word"
)

// proxy is an HTTP proxy that wants a password. It leads nameBehindProxy, with any port, to a
// server.
type proxy struct {
	address string
	server  string
	tunnels atomic.Int64 // CONNECT, for TLS
	passed  atomic.Int64 // requests without TLS
	told    atomic.Int64 // requests with a credential that is not for the proxy
}

func newProxy(t *testing.T, server string) *proxy {
	p := &proxy{server: server}
	s := httptest.NewServer(http.HandlerFunc(p.handle))
	t.Cleanup(s.Close)
	p.address = strings.TrimPrefix(s.URL, "http://")
	return p
}

// url is the proxy's, with a password.
func (p *proxy) url(password string) string {
	return "http://" + proxyUser + ":" + password + "@" + p.address
}

var proxyCredential = base64.StdEncoding.EncodeToString([]byte(proxyUser + ":" + proxyPassword))

func (p *proxy) handle(w http.ResponseWriter, r *http.Request) {
	host, _, _ := strings.Cut(r.Host, ":")
	if r.Header.Get("Authorization") != "" {
		p.told.Add(1)
	}
	switch {
	case r.Header.Get("Proxy-Authorization") != "Basic "+proxyCredential:
		w.Header().Set("Proxy-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusProxyAuthRequired)
	case host != rig.NameBehindProxy:
		w.WriteHeader(http.StatusBadGateway)
	case r.Method == http.MethodConnect:
		p.tunnels.Add(1)
		p.tunnel(w)
	default:
		p.passed.Add(1)
		(&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Host = p.server
			r.Out.Host = r.In.Host
		}}).ServeHTTP(w, r)
	}
}

func (p *proxy) tunnel(w http.ResponseWriter) {
	there, err := net.Dial("tcp", p.server)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer there.Close()
	w.WriteHeader(http.StatusOK)
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer here.Close()
	go func() {
		defer there.Close()
		_, _ = io.Copy(there, buffered)
	}()
	_, _ = io.Copy(here, there)
}

// TestRegistryProxy: a registry whose name only a proxy knows is reached through it, with TLS and
// without. Nobody learns the proxy's password.
func TestRegistryProxy(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := newDisk(t)
	for name, tls := range map[string]bool{"TLS": true, "plain": false} {
		t.Run(name, func(t *testing.T) {
			s := rig.StartRegistry(t, tls, "")
			p := newProxy(t, s.Address)
			_, port := testtool.Must2(net.SplitHostPort(s.Address))(t)
			registry := rig.NameBehindProxy + ":" + port
			ref := registry + "/vm/fedora:42"
			used, variable, flag := &p.tunnels, "HTTPS_PROXY", "--registry-ca="+s.CA
			if !tls {
				used, variable, flag = &p.passed, "HTTP_PROXY", "--insecure-registry="+registry
			}
			said := ""
			defer func() {
				assert.NotContains(t, said, proxyPassword)
				assert.NotContains(t, said, proxyCredential)
			}()
			env := []string{variable + "=" + p.url(proxyPassword)}
			disk := func(env []string, args ...string) rig.Result {
				r := rig.Run(t, env, append(args, flag)...)
				said += r.Output
				return r
			}

			r := disk(env, "push", "--base=none", qcow2, ref)
			require.Zero(t, r.Status, "%s", r)
			require.Positive(t, used.Swap(0))
			out := filepath.Join(t.TempDir(), "a.raw")
			r = disk(env, "pull", ref, out)
			require.Zero(t, r.Status, "%s", r)
			require.Positive(t, used.Swap(0))
			rig.SameFile(t, raw, out)

			d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Env: map[string]string{
				variable: p.url(proxyPassword), "LOG_LEVEL": "debug"},
				Args: []string{"--image=" + ref, flag, "--copy-mode=copy-on-write"}})
			rig.Same(t, raw, d.URL(1))
			require.Positive(t, used.Swap(0))
			d.Stop()
			said += d.Output()

			p = newProxy(t, s.Address) // the daemon's last request may still be on its way
			env = []string{variable + "=" + p.url(proxyPassword)}
			r = disk([]string{variable + "=" + p.url(proxyPassword+"x")}, "pull", ref, out+"1")
			require.Equal(t, 1, r.Status)
			require.Contains(t, r.Output, registry)
			require.Contains(t, r.Output, "407 Proxy Authentication Required")
			require.NotContains(t, r.Output, "next try", "another try changes nothing")

			r = disk(append(env, "NO_PROXY="+rig.NameBehindProxy), "pull", ref, out+"2")
			require.Equal(t, 1, r.Status)
			require.Contains(t, r.Output, "lookup "+rig.NameBehindProxy)
			require.Zero(t, p.tunnels.Load()+p.passed.Load())
		})
	}
}

// TestAddressProxy: a web server whose name only a proxy knows is reached through it. The proxy
// does not learn the server's credential, and neither is in what a person sees. Errors name the
// proxy.
func TestAddressProxy(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img")
	raw, qcow2 := newDisk(t)
	content := testtool.Must(os.ReadFile(qcow2))(t)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	own := rig.MakeCertificate(t, ca, ca+".key")
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter,
		r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != registryUser ||
			password != registryPassword {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Header().Set("ETag", `"1"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{own}}
	server.StartTLS()
	t.Cleanup(server.Close)
	p := newProxy(t, server.Listener.Addr().String())
	_, port := testtool.Must2(net.SplitHostPort(p.server))(t)
	host := rig.NameBehindProxy + ":" + port
	credential := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	logins := filepath.Join(t.TempDir(), "config.json")
	text, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]string{
		"auth": credential}}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(logins, text, 0o600))
	flags := []string{"--registry-ca=" + ca, "--registry-config=" + logins}
	address := "https://" + host + "/fedora.qcow2@sha256:" + rig.SHA256(content)

	said := ""
	pull := func(out string, env ...string) rig.Result {
		r := rig.Run(t, env, append([]string{"pull", address, out}, flags...)...)
		said += r.Output
		return r
	}
	out := filepath.Join(t.TempDir(), "a.raw")
	r := pull(out, "HTTPS_PROXY="+p.url(proxyPassword))
	require.Zero(t, r.Status, "%s", r)
	require.Positive(t, p.tunnels.Swap(0))
	rig.SameFile(t, raw, out)

	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Env: map[string]string{
		"HTTPS_PROXY": p.url(proxyPassword), "LOG_LEVEL": "debug"},
		Args: append([]string{"--image=" + address, "--copy-mode=copy-on-write",
			"--verify=when-complete"}, flags...)})
	rig.Same(t, raw, d.URL(1))
	require.Positive(t, p.tunnels.Swap(0))
	d.Stop()
	said += d.Output()

	r = pull(out+"1", "HTTPS_PROXY="+p.url(proxyPassword+"x"))
	require.Equal(t, 1, r.Status)
	require.Contains(t, r.Output, "the proxy "+p.address+" does not connect to "+host)
	require.Zero(t, p.tunnels.Load())
	// HTTP_PROXY is for addresses without TLS.
	for i, env := range [][]string{{"HTTP_PROXY=" + p.url(proxyPassword)},
		{"HTTPS_PROXY=" + p.url(proxyPassword), "NO_PROXY=" + rig.NameBehindProxy}} {
		r = pull(out+string(rune('2'+i)), env...)
		require.Equal(t, 1, r.Status)
		require.Contains(t, r.Output, "lookup "+rig.NameBehindProxy)
	}
	require.Zero(t, p.tunnels.Load())
	require.Zero(t, p.told.Load(), "the proxy has seen the credential of the server")
	for _, secret := range []string{proxyPassword, proxyCredential, registryPassword, credential} {
		require.NotContains(t, said, secret)
	}
}
