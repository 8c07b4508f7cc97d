package server

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume"
)

// guarded serves with a certificate and a token. An upload lasts until its content has come.
func guarded(t *testing.T, grace time.Duration) (address string, client func() *http.Client,
	token string) {
	t.Helper()
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	a := newAuthority(t, dir, "ca")
	a.sign(1, file("cert"), file("key"))
	token = "token-0123456789abcdef"
	require.NoError(t, os.WriteFile(file("token"), []byte(token), 0o600))
	m, err := volume.New(volume.Options{Dir: t.TempDir(), Disks: noDisks{}})
	require.NoError(t, err)
	s, err := New(Options{Volumes: m,
		Access: Access{Cert: file("cert"), Key: file("key"), Token: file("token")},
		Uploads: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
		})})
	require.NoError(t, err)
	s.most, s.grace = 16, grace
	s.http.ReadHeaderTimeout = time.Hour // so nobody goes because that is over
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := testtool.Go(func() error { return s.Serve(l) })
	t.Cleanup(func() {
		_ = s.http.Close()
		require.ErrorIs(t, <-served, http.ErrServerClosed)
		require.NoError(t, m.Close())
	})
	return l.Addr().String(), func() *http.Client {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: a.pool}}
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport, Timeout: time.Minute}
	}, token
}

func get(client *http.Client, address, token string) (int, error) {
	r, err := http.NewRequest(http.MethodGet, "https://"+address+"/volumes", nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	answer, err := client.Do(r)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode, err
}

// TestSilentStrangers: strangers who connect and say nothing, however many, keep no client out,
// and end no upload.
func TestSilentStrangers(t *testing.T) {
	address, client, token := guarded(t, strangerTime)
	content, send := io.Pipe()
	r, err := http.NewRequest(http.MethodPut, "https://"+address+"/volume/vm/data", content)
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	uploaded := testtool.Go(func() error {
		answer, err := client().Do(r)
		if err == nil {
			_ = answer.Body.Close()
		}
		return err
	})
	_, err = send.Write(make([]byte, 1<<20))
	require.NoError(t, err)

	for range 4 * 16 {
		conn := testtool.Must(net.Dial("tcp", address))(t)
		defer conn.Close()
	}
	status, err := get(client(), address, token)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)

	require.NoError(t, testtool.Err(send.Write(make([]byte, 1<<20))))
	require.NoError(t, send.Close())
	require.NoError(t, <-uploaded)
}

// TestCrowdOfClients: more clients than there is room for wait, and each gets its answer. None of
// them is taken for a stranger, however slow this machine is.
func TestCrowdOfClients(t *testing.T) {
	address, client, token := guarded(t, time.Minute)
	var all sync.WaitGroup
	for range 5 * 16 {
		c := client()
		all.Go(func() {
			for range 2 { // the second time its connection may be gone
				status, err := get(c, address, token)
				if err != nil || status != http.StatusOK {
					t.Errorf("%d %v", status, err)
				}
			}
		})
	}
	all.Wait()
}

// stranger opens a connection and begins a request without a token.
func stranger(t *testing.T, s *running, length int, more string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = fmt.Fprintf(c, "PUT /volume/vm/data HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"+
		"%s\r\n", length, more)
	require.NoError(t, err)
	return c
}

func readStatus(t *testing.T, c net.Conn) int {
	t.Helper()
	answer := testtool.Must(http.ReadResponse(bufio.NewReader(c), nil))(t)
	defer answer.Body.Close()
	require.NotEmpty(t, answer.Header.Get("WWW-Authenticate"))
	return answer.StatusCode
}

// TestTurnedAway: a client without a token gets its answer even if it sends first and reads then,
// as long as it sends little. The server does not ask it for its data, and does not read much of
// it.
func TestTurnedAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("0123456789abcdef"), 0o600))
	s := serve(t, Access{Token: file})
	piece := bytes.Repeat([]byte("x"), refusedBody*3/4)

	c := stranger(t, s, len(piece), "")
	require.NoError(t, testtool.Err(c.Write(piece)))
	require.Equal(t, http.StatusUnauthorized, readStatus(t, c))

	c = stranger(t, s, 1<<30, "Expect: 100-continue\r\n")
	require.Equal(t, http.StatusUnauthorized, readStatus(t, c))

	c = stranger(t, s, 1<<40, "")
	for sent := 0; ; sent += len(piece) {
		require.Less(t, sent, 1<<30, "everything is taken")
		if _, err := c.Write(piece); err != nil {
			return
		}
	}
}
