package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// noDisks is for requests that never reach a disk.
type noDisks struct{}

func (noDisks) Default() (api.Spec, error)        { return api.Spec{}, nil }
func (noDisks) Place(store.Place) (string, error) { return "", nil }
func (noDisks) Single() bool                      { return false }
func (noDisks) Enter(store.Record, bool) error    { return nil }
func (noDisks) TakeNumber(string, uint16) bool    { return true }
func (noDisks) Leave(string, bool) []string       { return nil }
func (noDisks) Forget(string)                     {}
func (noDisks) Open(context.Context, volume.Disk) (volume.Opened, error) {
	return nil, api.Errorf(api.CodeUnavailable, "there are no disks here")
}
func (noDisks) Waits(*api.Source, time.Time) string { return "" }

// running is a server, with its log.
type running struct {
	address string
	log     *observer.ObservedLogs
}

func serve(t *testing.T, access Access) *running {
	t.Helper()
	m, err := volume.New(volume.Options{Dir: t.TempDir(), Disks: noDisks{}})
	require.NoError(t, err)
	core, logs := observer.New(zap.DebugLevel)
	r := &running{log: logs}
	s, err := New(Options{Volumes: m, Access: access, Log: zap.New(core),
		Portal: func(net.Addr) (string, string) { return "127.0.0.1", "3260" }})
	require.NoError(t, err)
	s.timeout = time.Minute // the machine may be slow
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := testtool.Go(func() error { return s.Serve(l) })
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, s.Shutdown(ctx))
		require.ErrorIs(t, <-served, http.ErrServerClosed)
		require.NoError(t, m.Close())
	})
	r.address = l.Addr().String()
	return r
}

// ask makes a request on a connection of its own and returns its status and body.
func ask(t *testing.T, method, url string, config *tls.Config, change func(*http.Request)) (
	status int, body string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(""))
	require.NoError(t, err)
	if change != nil {
		change(r)
	}
	client := http.Client{Transport: &http.Transport{TLSClientConfig: config,
		DisableKeepAlives: true}}
	answer, err := client.Do(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(text)
}

func bearer(token string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
}

// TestToken: the server answers only with the token that is in the file now, and never logs it.
func TestToken(t *testing.T) {
	const first, second = "first-0123456789abcdef", "second-0123456789abcdef"
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(first+"\n"), 0o600))
	s := serve(t, Access{Token: file})
	url := "http://" + s.address + "/volumes"
	for _, wrong := range []func(*http.Request){nil, bearer(""), bearer(second), bearer(first[1:]),
		bearer(first + "x"), func(r *http.Request) { r.SetBasicAuth("x", first) }} {
		for _, path := range []string{"/volumes", "/openapi.yaml", "/nowhere"} {
			status, body := ask(t, "GET", "http://"+s.address+path, nil, wrong)
			require.Equal(t, 401, status)
			require.Contains(t, body, "code: unauthorized")
		}
	}
	status, body := ask(t, "GET", url, nil, bearer(first))
	require.Equal(t, 200, status, body)
	require.Equal(t, "volumes: []\n", body)
	require.NoError(t, os.WriteFile(file, []byte(second), 0o600))
	status, _ = ask(t, "GET", url, nil, bearer(first))
	require.Equal(t, 401, status)
	status, _ = ask(t, "GET", url, nil, bearer(second))
	require.Equal(t, 200, status)
	require.NoError(t, os.WriteFile(file, nil, 0o600)) // while it is being replaced
	for _, token := range []string{"", second} {
		status, _ = ask(t, "GET", url, nil, bearer(token))
		require.Equal(t, 503, status)
	}
	for _, token := range []string{first, second} {
		require.NotContains(t, fmt.Sprintf("%+v", s.log.All()), token)
	}
	// The same fault is told again, once the file could be used.
	require.NoError(t, os.WriteFile(file, []byte(second), 0o600))
	status, _ = ask(t, "GET", url, nil, bearer(second))
	require.Equal(t, 200, status)
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	status, _ = ask(t, "GET", url, nil, bearer(second))
	require.Equal(t, 503, status)
	require.Equal(t, 2, s.log.FilterMessageSnippet("token file").Len())
}

// TestLoopbackOnly: without a token, a page of another site in a browser of this machine must not
// reach the server.
func TestLoopbackOnly(t *testing.T) {
	s := serve(t, Access{})
	for host, want := range map[string]int{"localhost": 200, s.address: 200, "evil.example": 401} {
		status, body := ask(t, "GET", "http://"+s.address+"/volumes", nil,
			func(r *http.Request) { r.Host = host })
		require.Equal(t, want, status, body)
	}
}

func TestRequestLimits(t *testing.T) {
	s := serve(t, Access{})
	put := func(body io.Reader) (int, string) {
		r, err := http.NewRequestWithContext(t.Context(), "PUT", "http://"+s.address+"/volume/x",
			body)
		require.NoError(t, err)
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return answer.StatusCode, string(text)
	}
	status, body := put(strings.NewReader("size: 1Gi #" + strings.Repeat("x", maxBody)))
	require.Equal(t, 413, status, body)
	status, body = put(strings.NewReader("size: 1Gi\n"))
	require.Equal(t, 503, status, body)
	require.Contains(t, body, "there are no disks here")
	status, body = ask(t, "DELETE", "http://"+s.address+"/volume/x?force=perhaps", nil, nil)
	require.Equal(t, 400, status, body)
	status, body = ask(t, "GET", "http://"+s.address+"/volume/x", nil,
		func(r *http.Request) { r.Header.Set("Accept", "application/json") })
	require.Equal(t, 404, status)
	require.JSONEq(t, `{"code": "not-found", "error": "there is no volume \"x\""}`, body)
	status, _ = ask(t, "POST", "http://"+s.address+"/volume/x", nil, nil)
	require.Equal(t, 405, status)
}

// TestLongWork: a request that has come in whole is worked on for as long as the work may take,
// such as a snapshot for which much has to reach storage.
func TestLongWork(t *testing.T) {
	s := &Server{opt: Options{Log: zap.NewNop()}, arrival: time.Millisecond}
	web := httptest.NewServer(s.limited(func(w http.ResponseWriter, r *http.Request) error {
		select {
		case <-r.Context().Done():
			return r.Context().Err()
		case <-time.After(100 * time.Millisecond): // the time to arrive is over
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}))
	t.Cleanup(web.Close)
	for _, method := range []string{"GET", "PUT", "POST", "DELETE"} {
		status, body := ask(t, method, web.URL, nil, nil)
		require.Equal(t, http.StatusNoContent, status, "%s: %s", method, body)
	}
}

func TestAccessCheck(t *testing.T) {
	for _, c := range []struct {
		access   Access
		loopback bool
		want     string
	}{
		{Access{}, true, ""},
		{Access{Token: "t"}, true, ""},
		{Access{}, false, "without a certificate"},
		{Access{Token: "t"}, false, "without a certificate"},
		{Access{Cert: "c", Key: "k"}, false, "everybody who reaches"},
		{Access{Cert: "c", Key: "k", Token: "t"}, false, ""},
		{Access{Cert: "c", Key: "k", ClientCA: "a"}, false, ""},
		{Access{Cert: "c"}, true, "a certificate needs its key"},
		{Access{ClientCA: "a"}, true, "clients can show certificates only"},
	} {
		err := c.access.Check(c.loopback)
		if c.want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.want)
		}
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"short": "secret", "words": "a long sentence of " +
		"words",
		"empty": ""} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		_, err := New(Options{Access: Access{Token: path}})
		require.ErrorContains(t, err, "one word of at least 16")
		if text != "" {
			require.NotContains(t, err.Error(), text)
		}
	}
	_, err := New(Options{Access: Access{Token: filepath.Join(dir, "none")}})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NotContains(t, err.Error(), dir, "the name may be the token")
}

// TestBrokenConnections: who connects and speaks no TLS is in the log, and not once for each time.
func TestBrokenConnections(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	newAuthority(t, dir, "ca").sign(1, at("cert"), at("key"))
	s := serve(t, Access{Cert: at("cert"), Key: at("key")})
	for range 20 {
		c := testtool.Must(net.Dial("tcp", s.address))(t)
		require.NoError(t, testtool.Err(c.Write([]byte("SSH-2.0-x\r\n"))))
		_, _ = io.Copy(io.Discard, c) // until the server has closed it
		require.NoError(t, c.Close())
	}
	require.Equal(t, 1, s.log.FilterMessageSnippet("TLS handshake error").Len())
}

// TestRequestsAtOnce: a connection of HTTP/2 may have as many requests at once as clients take for
// granted (RFC 9113 6.5.2). They could not repeat a request that was one too many.
func TestRequestsAtOnce(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	a := newAuthority(t, dir, "ca")
	a.sign(1, at("cert"), at("key"))
	s := serve(t, Access{Cert: at("cert"), Key: at("key")})
	c := testtool.Must(tls.Dial("tcp", s.address, &tls.Config{RootCAs: a.pool,
		NextProtos: []string{"h2"}}))(t)
	defer c.Close()
	const settings = 4
	require.NoError(t, testtool.Err(fmt.Fprintf(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n%s",
		[]byte{0, 0, 0, settings, 0, 0, 0, 0, 0})))
	head := make([]byte, 9)
	require.NoError(t, testtool.Err(io.ReadFull(c, head)))
	require.EqualValues(t, settings, head[3])
	all := make([]byte, int(head[1])<<8|int(head[2]))
	require.NoError(t, testtool.Err(io.ReadFull(c, all)))
	require.Contains(t, slices.Collect(slices.Chunk(all, 6)), []byte{0, 3, 0, 0, 0, maxStreams})
}

// TestRefusalsAtOnce: strangers are answered up to a number at once, so they cannot use up the
// memory by requests whose answers they do not take.
func TestRefusalsAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("0123456789abcdef"), 0o600))
	s := testtool.Must(New(Options{Access: Access{Token: file}}))(t)
	s.timeout, s.refusals = time.Minute, make(chan struct{}, 1)
	web := httptest.NewServer(s.handler())
	defer web.Close()
	one := &running{address: web.Listener.Addr().String()}
	first := stranger(t, one, 1000, "") // and sends nothing more
	require.Equal(t, http.StatusUnauthorized, readStatus(t, first))
	_, err := http.Get(web.URL)
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, first.Close())
	testtool.Eventually(t, func() bool { return len(s.refusals) == 0 })
	status, _ := ask(t, "GET", web.URL, nil, nil)
	require.Equal(t, http.StatusUnauthorized, status)
}

// authority is a certificate authority.
type authority struct {
	t    *testing.T
	pool *x509.CertPool
	file string
}

func newAuthority(t *testing.T, dir, name string) *authority {
	t.Helper()
	a := &authority{t: t, file: filepath.Join(dir, name+"-ca.pem")}
	require.NoError(t, certtest.Authority(a.file, a.file+".key"))
	var err error
	a.pool, err = certtest.Pool(a.file)
	require.NoError(t, err)
	return a
}

// sign writes a certificate and its key.
func (a *authority) sign(serial int64, cert, key string) {
	a.t.Helper()
	require.NoError(a.t, certtest.Sign(a.file, a.file+".key", cert, key,
		func(c *x509.Certificate) { c.SerialNumber.SetInt64(serial) }))
}

// TestCertificates: clients of the authority are admitted without a token, and all files are read
// again when they change.
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	good, other := newAuthority(t, dir, "good"), newAuthority(t, dir, "other")
	good.sign(2, at("cert"), at("key"))
	good.sign(3, at("good.cert"), at("good.key"))
	other.sign(4, at("other.cert"), at("other.key"))
	const token = "0123456789abcdef"
	require.NoError(t, os.WriteFile(at("token"), []byte(token), 0o600))
	require.NoError(t, os.Link(good.file, at("ca")))
	s := serve(t, Access{Cert: at("cert"), Key: at("key"), ClientCA: at("ca"), Token: at("token")})
	url := "https://" + s.address + "/volumes"
	with := func(name string) *tls.Config {
		c := &tls.Config{RootCAs: good.pool}
		if name != "" {
			pair := testtool.Must(tls.LoadX509KeyPair(at(name+".cert"), at(name+".key")))(t)
			// Without this, Go's client sends only a certificate that the server asks for.
			c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				return &pair, nil
			}
		}
		return c
	}
	status, _ := ask(t, "GET", url, with("good"), nil)
	require.Equal(t, 200, status)
	status, _ = ask(t, "GET", url, with(""), bearer(token))
	require.Equal(t, 200, status)
	status, _ = ask(t, "GET", url, with(""), nil)
	require.Equal(t, 401, status)
	_, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: with("other")}}).Get(url)
	require.Error(t, err, "a certificate of somebody else")

	serial := func() int64 {
		c := testtool.Must(tls.Dial("tcp", s.address, with("")))(t)
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	require.Equal(t, int64(2), serial())
	require.NoError(t, os.WriteFile(at("key"), nil, 0o600)) // while it is being replaced
	require.Equal(t, int64(2), serial())
	good.sign(5, at("cert"), at("key"))
	require.Equal(t, int64(5), serial())
	require.NoError(t, os.Rename(other.file, at("ca")))
	_, err = (&http.Client{Transport: &http.Transport{TLSClientConfig: with("good")}}).Get(url)
	require.Error(t, err, "the authority has changed")
	status, _ = ask(t, "GET", url, with("other"), nil)
	require.Equal(t, 200, status)
}
