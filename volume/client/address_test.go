package client

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestAnswerOfAProxy: an answer that no volumes server gives is no success.
func TestAnswerOfAProxy(t *testing.T) {
	for method, statuses := range map[string][]int{http.MethodGet: {204, 206, 302},
		http.MethodPut: {204, 302}, http.MethodDelete: {200, 202, 302}} {
		for _, status := range statuses {
			proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
				_ *http.Request) {
				w.WriteHeader(status)
				_, _ = io.WriteString(w, `{"error": "log in first"}`)
			}))
			c := testtool.Must(New(Options{Server: proxy.URL}))(t)
			err := map[string]func() error{
				http.MethodGet: func() error { return testtool.Err(c.Get(t.Context(), "vm")) },
				http.MethodPut: func() error {
					return testtool.Err(c.Put(t.Context(), "vm", api.Spec{}))
				},
				http.MethodDelete: func() error { return c.Delete(t.Context(), "vm", false) },
			}[method]()
			require.ErrorContains(t, err, "which no volumes server does", "%s %d", method, status)
			c.Close()
			proxy.Close()
		}
	}
}

// TestUploadToAWrongAddress: what cannot heal ends the upload at once, with what to do. A server
// that has answered may be starting again, so the upload goes on trying.
func TestUploadToAWrongAddress(t *testing.T) {
	handler := http.NotFoundHandler()
	plain, secure := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer plain.Close()
	defer secure.Close()
	unused := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
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

	for name, answer := range map[string]http.HandlerFunc{
		"begun": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/upload/1")
			w.Header().Set("Connection", "close")
			w.WriteHeader(http.StatusCreated)
		},
		"killed": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		server := httptest.NewUnstartedServer(nil)
		server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				handler.ServeHTTP(w, r)
				return
			}
			require.NoError(t, server.Listener.Close())
			answer(w, r)
		})
		server.Start()
		require.ErrorContains(t, upload(server.URL, func(error) {}), "made no progress", name)
		server.Close()
	}
}

// TestUploadToADeletedVolume: a volume that somebody deletes meanwhile is not made anew, without
// the size and the place that it had.
func TestUploadToADeletedVolume(t *testing.T) {
	var puts, gets atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		switch {
		case r.Method == http.MethodPut && puts.Add(1) > 0:
			w.Header().Set("Location", r.URL.Path+"/1")
			w.WriteHeader(http.StatusCreated)
		case r.Method == http.MethodGet && gets.Add(1) == 1:
			w.WriteHeader(http.StatusAccepted)
			_, _ = io.WriteString(w, `{"volume": {"name": "vm", "state": "awaiting"}}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"code": "not-found", "error": "there is no such thing"}`)
		}
	}))
	defer server.Close()
	c := testtool.Must(New(Options{Server: server.URL}))(t)
	defer c.Close()
	_, err := c.Upload(t.Context(), "vm", bytes.NewReader(make([]byte, 512)), 512, UploadOptions{})
	require.ErrorContains(t, err, `the volume "vm" was deleted while data was sent to it`)
	require.EqualValues(t, 1, puts.Load())
}

// TestUploadElsewhere: a server, or a proxy before it, that names an address of another server does
// not make the client send its token there.
func TestUploadElsewhere(t *testing.T) {
	asked := 0
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		asked++
	}))
	defer other.Close()
	host := other.Listener.Addr().String()
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("0123456789abcdef"), 0o600))
	for _, location := range []string{other.URL + "/upload/1", "//" + host + "/upload/1",
		"https:///upload/1"} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", location)
			w.WriteHeader(http.StatusCreated)
		}))
		c, err := New(Options{Server: server.URL, TokenFile: token})
		require.NoError(t, err)
		_, err = c.Upload(t.Context(), "vm", bytes.NewReader(make([]byte, 512)), 512,
			UploadOptions{Again: func(err error) { t.Errorf("tried again: %v", err) }})
		require.ErrorContains(t, err, "must not get the token", location)
		c.Close()
		server.Close()
	}
	require.Zero(t, asked)
}

// TestProvideEndsWhileItAsks: also then, the error says what the volume waits for.
func TestProvideEndsWhileItAsks(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			cancel(errors.New("a test ends it"))
			<-r.Context().Done()
			return
		}
		_ = json.NewEncoder(w).Encode(api.Volume{Info: api.Info{State: api.StateFilling}})
	}))
	defer server.Close()
	c := testtool.Must(New(Options{Server: server.URL}))(t)
	defer c.Close()
	_, err := c.Provide(ctx, "vm1", api.Spec{})
	require.EqualError(t, err, `volume "vm1" gets its image: a test ends it`)
}

// TestHashed: the digest is right, whichever parts of the file are read and however often.
func TestHashed(t *testing.T) {
	data := make([]byte, 3*pieceSize+1000)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(data)
	sum := sha256.Sum256(data)
	want := "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
	pick := rand.New(random)
	for range 50 {
		h := &hashed{from: bytes.NewReader(data), size: int64(len(data))}
		h.reset()
		for range pick.IntN(6) {
			off := pick.Int64N(int64(len(data)) + 1)
			require.NoError(t, h.seek(t.Context(), off))
			n := pick.IntN(len(data) - int(off) + 1)
			got := make([]byte, n)
			require.NoError(t, testtool.Err(io.ReadFull(h, got)))
			require.True(t, bytes.Equal(data[off:int(off)+n], got))
		}
		digest := testtool.Must(h.digest(t.Context()))(t)
		require.Equal(t, want, digest)
	}
	short := &hashed{from: bytes.NewReader(data), size: int64(len(data)) + 1}
	short.reset()
	require.ErrorIs(t, testtool.Err(short.digest(t.Context())), io.ErrUnexpectedEOF)
}
