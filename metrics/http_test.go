package metrics

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/target"
)

func get(t *testing.T, url string) (int, string, http.Header) {
	t.Helper()
	res, err := http.Get(url)
	require.NoError(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(body), res.Header
}

func TestPages(t *testing.T) {
	m := full()
	var notReady, unhealthy error
	ts := httptest.NewServer(m.Handler(Pages{
		Status: func() Status {
			return Status{State: StateOpening, TargetName: "iqn.x", Portals: []string{"127.0.0.1:3260"}, Authentication: "chap",
				LUNs:     []LUNStatus{{LUN: 1, Image: "a<b>.raw", SizeBytes: 512, Copy: NewCopyStatus(fixedProgress{copied: 1, data: 2, total: 4})}},
				Sessions: []target.SessionInfo{{Initiator: initiatorA}}}
		},
		Ready:  func() error { return notReady },
		Health: func() error { return unhealthy },
	}, zap.NewNop()))
	defer ts.Close()

	for _, path := range []string{"/healthz", "/readyz"} {
		status, body, header := get(t, ts.URL+path)
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, "ok\n", body)
		require.Equal(t, "no-store", header.Get("Cache-Control"))
	}
	_, page, _ := get(t, ts.URL+"/metrics")
	require.Contains(t, page, "kubevirt_disk_ready 1")
	require.Contains(t, page, "go_goroutines")
	require.Contains(t, page, "process_open_fds")

	notReady = errors.New("fedora.qcow2: 40 % expanded")
	status, body, _ := get(t, ts.URL+"/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, "40 % expanded")
	status, _, _ = get(t, ts.URL+"/healthz")
	require.Equal(t, http.StatusOK, status, "not ready is not unhealthy")
	_, page, _ = get(t, ts.URL+"/metrics")
	require.Contains(t, page, "kubevirt_disk_ready 0")

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
	require.Equal(t, map[string]any{"copied_bytes": 1.0, "data_bytes": 2.0, "total_bytes": 4.0, "complete": false}, lun["copy"])
	require.Len(t, s["sessions"], 1)

	status, _, _ = get(t, ts.URL+"/secrets")
	require.Equal(t, http.StatusNotFound, status)
	res, err := http.Post(ts.URL+"/status", "text/plain", nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusMethodNotAllowed, res.StatusCode)
}

func TestServerBoundsSlowClients(t *testing.T) {
	s := NewServer(http.NotFoundHandler(), zap.NewNop())
	require.NotZero(t, s.ReadHeaderTimeout)
	require.NotZero(t, s.ReadTimeout)
	require.NotZero(t, s.WriteTimeout)
	require.NotZero(t, s.IdleTimeout)
	require.NotZero(t, s.MaxHeaderBytes)
}
