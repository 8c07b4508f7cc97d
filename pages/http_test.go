package pages

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

func get(t *testing.T, url string) (int, string, http.Header) {
	t.Helper()
	res := testtool.Must(http.Get(url))(t)
	defer res.Body.Close()
	return res.StatusCode, string(testtool.Must(io.ReadAll(res.Body))(t)), res.Header
}

func TestPages(t *testing.T) {
	var notReady, unhealthy error
	var trouble []string
	mux := http.NewServeMux()
	Register(mux, Daemon{
		Status: func() status.Status {
			return status.Status{
				State: status.StateOpening, TargetName: "iqn.x", Authentication: "chap",
				Portals: []string{"127.0.0.1:3260"},
				LUNs: []status.LUN{{LUN: 1, Image: "a<b>.raw", SizeBytes: 512,
					Copy: &status.Copy{CopiedBytes: 1, DataBytes: 2, TotalBytes: 4,
						WaitsForSpace: true}}},
				Sessions: []status.Session{{Initiator: "iqn.1993-08.org.debian:01:aaaa"}},
			}
		},
		Ready:   func() error { return notReady },
		Trouble: func() []string { return trouble },
		Health:  func() error { return unhealthy },
	})
	ts := httptest.NewServer(mux)
	defer ts.Close()

	for _, path := range []string{"/healthz", "/readyz"} {
		status, body, header := get(t, ts.URL+path)
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, "ok\n", body)
		require.Equal(t, "no-store", header.Get("Cache-Control"))
	}
	trouble = []string{"LUN 1 (a\nb): \x1b[2J"}
	_, body, _ := get(t, ts.URL+"/readyz")
	require.Equal(t, "ok\nLUN 1 (a\ufffdb): \ufffd[2J\n", body)
	notReady = errors.New("fedora.qcow2: 40 % expanded")
	status, body, _ := get(t, ts.URL+"/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, "40 % expanded")
	status, _, _ = get(t, ts.URL+"/healthz")
	require.Equal(t, http.StatusOK, status, "not ready is not unhealthy")

	notReady = errors.New("LUN 1 (a): waits: it says \x1b[2J\nLUN 2 (b): waits")
	_, body, _ = get(t, ts.URL+"/readyz")
	require.Equal(t, "LUN 1 (a): waits: it says \ufffd[2J\nLUN 2 (b): waits\n", body)

	unhealthy = errors.New("LUN 2 (data.raw): disk has failed")
	status, body, _ = get(t, ts.URL+"/healthz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, "data.raw")

	status, body, header := get(t, ts.URL+"/status")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "application/json", header.Get("Content-Type"))
	var s map[string]any
	require.NoError(t, json.Unmarshal([]byte(body), &s))
	require.Equal(t, "opening", s["state"])
	require.Equal(t, "iqn.x", s["target_name"])
	lun := s["luns"].([]any)[0].(map[string]any)
	require.Equal(t, "a<b>.raw", lun["image"])
	require.Equal(t, map[string]any{"copied_bytes": 1.0, "data_bytes": 2.0, "total_bytes": 4.0,
		"complete": false, "waits_for_space": true}, lun["copy"])
	require.Len(t, s["sessions"], 1)

	status, _, _ = get(t, ts.URL+"/secrets")
	require.Equal(t, http.StatusNotFound, status)
	res := testtool.Must(http.Post(ts.URL+"/status", "text/plain", nil))(t)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusMethodNotAllowed, res.StatusCode)
}

// TestPagesTellWhereTheyAre checks that a client in another container of the pod can see that the
// pages are not of its own container.
func TestPagesTellWhereTheyAre(t *testing.T) {
	require.NotEmpty(t, Container())
	ts := httptest.NewServer(NewServer(http.NotFoundHandler(), zap.NewNop()).Handler)
	defer ts.Close()
	_, _, header := get(t, ts.URL+"/nothing")
	require.Equal(t, Container(), header.Get(ContainerHeader))
}

// TestManyConnections checks that idle connections cost little, and that the server still answers a
// probe or a scrape that comes after them.
func TestManyConnections(t *testing.T) {
	ts := httptest.NewUnstartedServer(nil)
	mux := http.NewServeMux()
	Register(mux, Daemon{Status: func() status.Status { return status.Status{} },
		Ready: func() error { return nil }, Health: func() error { return nil }})
	ts.Config = NewServer(mux, zap.NewNop())
	ts.Start()
	defer ts.Close()
	address := ts.Listener.Addr().String()
	var all []net.Conn
	for range 4 * maxConnections {
		c := testtool.Must(net.Dial("tcp", address))(t)
		defer c.Close()
		_, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		require.NoError(t, testtool.Err(http.ReadResponse(bufio.NewReader(c), nil)))
		all = append(all, c)
	}
	status, _, _ := get(t, ts.URL+"/readyz")
	require.Equal(t, http.StatusOK, status)
	// Which connections remain depends on when the server noticed that they are idle.
	for _, c := range all[:2*maxConnections] {
		// This is much sooner than the idle timeout of the server.
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	last := all[len(all)-1]
	_, err := io.WriteString(last, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	_, err = http.ReadResponse(bufio.NewReader(last), nil)
	require.NoError(t, err, "a late connection is kept")
}

// TestShortConnectionsPushNobodyOut checks that the server keeps the connection of a scraper while
// probes come and go.
func TestShortConnectionsPushNobodyOut(t *testing.T) {
	ts := httptest.NewUnstartedServer(nil)
	ts.Config = NewServer(http.NotFoundHandler(), zap.NewNop())
	ts.Start()
	defer ts.Close()
	ask := func(c net.Conn, more string) {
		_, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n"+more+"\r\n")
		require.NoError(t, err)
		require.NoError(t, testtool.Err(http.ReadResponse(bufio.NewReader(c), nil)))
	}
	stays := testtool.Must(net.Dial("tcp", ts.Listener.Addr().String()))(t)
	defer stays.Close()
	ask(stays, "")
	for range 2 * maxConnections {
		c := testtool.Must(net.Dial("tcp", ts.Listener.Addr().String()))(t)
		ask(c, "Connection: close\r\n")
		require.NoError(t, testtool.Err(io.Copy(io.Discard, c)))
		require.NoError(t, c.Close())
	}
	ask(stays, "")
}

// TestPagesOfOtherSites: what a page may change some day, no page of another site may.
func TestPagesOfOtherSites(t *testing.T) {
	reached := false
	h := NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }),
		zap.NewNop()).Handler
	for origin, want := range map[string]int{"http://evil.example": http.StatusForbidden,
		"http://127.0.0.1:9260": http.StatusOK, "": http.StatusOK} {
		reached = false
		r := httptest.NewRequest(http.MethodPost, "/status", nil)
		r.Host = "127.0.0.1:9260"
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, want, w.Code, origin)
		require.Equal(t, want == http.StatusOK, reached, origin)
	}
}

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
