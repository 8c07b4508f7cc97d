package metrics

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

// TestPage checks that the page shows both the daemon and the process.
func TestPage(t *testing.T) {
	m := full()
	ts := httptest.NewServer(m.Handler(zap.NewNop()))
	defer ts.Close()
	get := func() string {
		res, err := http.Get(ts.URL)
		require.NoError(t, err)
		defer res.Body.Close()
		require.Equal(t, http.StatusOK, res.StatusCode)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return string(body)
	}
	ready := true
	m.SetReady(func() bool { return ready })
	page := get()
	require.Contains(t, page, "kubevirt_disk_ready 1")
	require.Contains(t, page, "go_goroutines")
	require.Contains(t, page, "process_open_fds")
	ready = false
	require.Contains(t, get(), "kubevirt_disk_ready 0")
}
