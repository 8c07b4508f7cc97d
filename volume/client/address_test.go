package client

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestUploadToAWrongAddress: what cannot heal ends the upload at once, with what to do. A server
// that has answered may be starting again, so the upload goes on trying.
func TestUploadToAWrongAddress(t *testing.T) {
	handler := http.NotFoundHandler()
	plain, secure := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer plain.Close()
	defer secure.Close()
	unused, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, unused.Close())
	upload := func(server string, again func(error)) error {
		c, err := New(Options{Server: server})
		require.NoError(t, err)
		defer c.Close()
		_, err = c.Upload(t.Context(), "vm", bytes.NewReader(make([]byte, 512)), 512,
			UploadOptions{Again: again, Timeout: time.Second})
		return err
	}
	for server, want := range map[string]string{
		"https://" + plain.Listener.Addr().String(): "write http://",
		"http://" + secure.Listener.Addr().String(): "write https://",
		"http://" + unused.Addr().String():          "nothing listens there",
		"http://no-such-host.invalid":               "check the name",
	} {
		err := upload(server, func(err error) { t.Errorf("%s: tried again: %v", server, err) })
		require.ErrorContains(t, err, want)
	}

	begun := httptest.NewUnstartedServer(nil)
	begun.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", "/upload/1")
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusCreated)
		go begun.Close()
	})
	begun.Start()
	tries := 0
	require.Error(t, upload(begun.URL, func(error) { tries++ }))
	require.Positive(t, tries)
}
