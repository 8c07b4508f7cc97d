package pages

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOnlyHosts: a name that a stranger can register gets no page, so that no page of a stranger
// can read this one in a browser. Probes are answered in any case.
func TestOnlyHosts(t *testing.T) {
	page := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	h := OnlyHosts(page, []string{"vm.example.com"}, "--pages-host")
	ask := func(host, path string) (int, string) {
		r := httptest.NewRequest("GET", path, nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	for _, host := range []string{"127.0.0.1:9260", "10.1.2.3", "[fd00::1]:9260", "[::1]", "",
		"localhost:9260", "LOCALHOST", "disks", "disks.ns.svc", "Disks.NS.SVC",
		"disks.ns.svc.cluster.local:9260", "vm.example.com", "VM.example.com.:80"} {
		for _, path := range []string{"/", "/status", "/metrics", "/readyz"} {
			code, _ := ask(host, path)
			require.Equal(t, http.StatusOK, code, "%s %s", host, path)
		}
	}
	for _, host := range []string{"evil.example.com", "127.0.0.1.evil.com",
		"localhost.evil.com:9260", "disks.ns.svc.evil.com", "example.com", "x.vm.example.com",
		"evilsvc.com"} {
		for _, path := range []string{"/", "/status", "/metrics", "/events"} {
			code, text := ask(host, path)
			require.Equal(t, http.StatusMisdirectedRequest, code, "%s %s", host, path)
			require.Contains(t, text, "--pages-host")
		}
		code, _ := ask(host, "/healthz")
		require.Equal(t, http.StatusOK, code)
	}
	path := filepath.Join(t.TempDir(), "resolv.conf")
	text := "nameserver 10.0.0.1\nsearch ns.svc.Corp.example svc.corp.example. com\n" +
		"options ndots:5\n"
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	ends := searchDomains(path)
	require.Equal(t, []string{".ns.svc.corp.example", ".svc.corp.example"}, ends)
	require.True(t, knownHost("disks.ns.svc.corp.example:80", nil, ends))
	require.False(t, knownHost("evil.com", nil, ends))
}
