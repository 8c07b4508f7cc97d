package metrics

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// TestPage checks that the page shows both the daemon and the process.
func TestPage(t *testing.T) {
	page := status.Status{Ready: true}
	m := of(&page)
	ts := httptest.NewServer(m.Handler(zap.NewNop()))
	defer ts.Close()
	get := func() string {
		res := testtool.Must(http.Get(ts.URL))(t)
		defer res.Body.Close()
		require.Equal(t, http.StatusOK, res.StatusCode)
		return string(testtool.Must(io.ReadAll(res.Body))(t))
	}
	text := get()
	require.Contains(t, text, "kubevirt_disk_ready 1")
	require.Contains(t, text, "go_goroutines")
	require.Contains(t, text, "process_open_fds")
	page.Ready = false
	require.Contains(t, get(), "kubevirt_disk_ready 0")
}
