package server

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/volume"
)

// TestPagesOfOtherSites: a browser that may ask sends what any page tells it to. None of these
// requests is looked at, whatever shows that the browser may ask; the pages of this server's own
// origin, and programs, are answered as ever.
func TestPagesOfOtherSites(t *testing.T) {
	const token = "0123456789abcdef"
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(token), 0o600))
	authority := newAuthority(t, t.TempDir(), "ca")
	cert := filepath.Join(t.TempDir(), "cert")
	authority.sign(1, cert, cert+".key")
	m, err := volume.New(volume.Options{Dir: t.TempDir(), Disks: noDisks{}})
	require.NoError(t, err)
	defer m.Close()

	foreign := []http.Header{
		{"Sec-Fetch-Site": {"cross-site"}, "Origin": {"https://evil.example"},
			"Content-Type": {"application/x-www-form-urlencoded"}},
		{"Sec-Fetch-Site": {"cross-site"}},
		{"Sec-Fetch-Site": {"same-site"}, "Origin": {"http://localhost:24005"}},
		{"Origin": {"https://evil.example"}}, // browsers before 2023
		{"Origin": {"null"}},                 // a sandboxed frame
		{"Origin": {"http://localhost:24005"}},
		{"Origin": {"http://localhost.evil.example:8443"}},
	}
	own := []http.Header{{}, {"Sec-Fetch-Site": {"same-origin"}}, {"Sec-Fetch-Site": {"none"}},
		{"Origin": {"https://localhost:8443"}}}
	for name, c := range map[string]struct {
		access Access
		show   func(*http.Request)
	}{
		"without proof": {Access{}, func(*http.Request) {}},
		"with a token":  {Access{Token: file}, bearer(token)},
		"with a certificate": {Access{Cert: cert, Key: cert + ".key", ClientCA: authority.file},
			func(r *http.Request) {
				r.TLS = &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{}}}}
			}},
	} {
		reached := false
		s, err := New(Options{Volumes: m, Access: c.access,
			Uploads: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true })})
		require.NoError(t, err)
		handler := s.http.Handler
		answer := func(method, path string, fields http.Header) *httptest.ResponseRecorder {
			r := httptest.NewRequest(method, path, strings.NewReader("size: 1Gi"))
			r.Host, r.Header = "localhost:8443", fields.Clone()
			c.show(r)
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			return w
		}
		asked := 0
		for _, path := range documented(t) {
			for _, method := range []string{"PUT", "POST", "PATCH", "DELETE", "TRACE", "REVERT"} {
				for _, fields := range foreign {
					w := answer(method, path, fields)
					require.Equal(t, http.StatusForbidden, w.Code, "%s: %s %s %v", name, method,
						path, fields)
					require.Contains(t, w.Body.String(), "code: forbidden")
					require.Empty(t, w.Header().Get("Access-Control-Allow-Origin"))
					asked++
				}
				for _, fields := range own {
					require.NotEqual(t, http.StatusForbidden, answer(method, path, fields).Code,
						"%s: %s %s %v", name, method, path, fields)
				}
			}
			require.NotEqual(t, http.StatusForbidden, answer("GET", path, foreign[0]).Code)
		}
		require.True(t, reached, "the own requests are looked at")
		reached = false
		for _, fields := range foreign {
			answer("PUT", "/volume/vm1/data", fields)
			answer("PATCH", "/volume/vm1/data/1", fields)
		}
		require.False(t, reached)
		require.NotZero(t, asked)
	}
}

// documented returns the paths of the document, with a name in place of each parameter.
func documented(t *testing.T) (all []string) {
	t.Helper()
	var doc map[string]any
	require.NoError(t, yaml.Unmarshal(openAPI, &doc))
	names := strings.NewReplacer("{name}", "vm1", "{snapshot}", "old", "{upload}", "1")
	for path := range at(t, doc, "paths") {
		all = append(all, names.Replace(path))
	}
	require.Contains(t, all, "/volume/vm1/snapshots/old/revert")
	return all
}
