package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLink: data arrives unchanged, and not too early.
func TestLink(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(content)
	}))
	defer server.Close()
	k, err := newLink(strings.TrimPrefix(server.URL, "http://"))
	require.NoError(t, err)
	defer func() { require.NoError(t, k.close()) }()
	begin := time.Now()
	res, err := http.Get("http://" + k.address)
	require.NoError(t, err)
	got, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, got))
	least := 4*linkDelay + time.Duration(float64(len(content))/linkRate*float64(time.Second))
	require.GreaterOrEqual(t, time.Since(begin), least)
	require.Greater(t, k.fetched.Load(), int64(len(content)))
}
