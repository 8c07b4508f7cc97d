package objects

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestPageOfManyValues: a pod that answers in place of a daemon cannot make the controller take
// hundreds of megabytes.
func TestPageOfManyValues(t *testing.T) {
	luns := "null"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"luns":[%s]}`, luns)
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	got, err := ReadStatus(t.Context(), address)
	require.NoError(t, err)
	require.Len(t, got.LUNs, 1)
	luns += strings.Repeat(",{}", maxValues+1)
	_, err = ReadStatus(t.Context(), address)
	require.ErrorContains(t, err, "more than 16384 values")
	luns = strings.Repeat(" ", MaxPage)
	require.Error(t, testtool.Err(ReadStatus(t.Context(), address)))
}
