package upload

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/client"
)

// cutter is a proxy that cuts a connection after some bytes from the client.
type cutter struct {
	net.Listener
	after atomic.Int64 // 0: not at all
	cuts  atomic.Int64
	back  string
}

func newCutter(t *testing.T, back string, after int64) *cutter {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	c := &cutter{Listener: l, back: back}
	c.after.Store(after)
	var work sync.WaitGroup
	work.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() { c.pass(from) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		work.Wait()
	})
	return c
}

func (c *cutter) pass(from net.Conn) {
	defer from.Close()
	to, err := net.Dial("tcp", c.back)
	if err != nil {
		return
	}
	defer to.Close()
	go func() {
		_, _ = io.Copy(from, to)
		_ = from.Close()
	}()
	limit := c.after.Load()
	if limit == 0 {
		_, _ = io.Copy(to, from)
		return
	}
	if n, _ := io.CopyN(to, from, limit); n == limit {
		c.cuts.Add(1)
	}
}

// json makes the server answer as package server does.
func (s *server) json() {
	s.handler.opt.Done = func(w http.ResponseWriter, _ *http.Request, name string) {
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(api.Volume{Info: api.Info{Name: name, State: api.StateReady}})
	}
	s.handler.opt.Refuse = func(w http.ResponseWriter, _ *http.Request, err error) {
		refused := &api.Error{Status: 500, Message: err.Error()}
		_ = errors.As(err, &refused)
		w.WriteHeader(refused.HTTPStatus())
		_ = json.NewEncoder(w).Encode(refused)
	}
}

func newClient(t *testing.T, address string) *client.Client {
	t.Helper()
	c := testtool.Must(client.New(client.Options{Server: "http://" + address}))(t)
	t.Cleanup(c.Close)
	return c
}

// TestClientResumes: the connection breaks all the time, and the upload gets through.
func TestClientResumes(t *testing.T) {
	raw := rawDisk(7 << 20)
	for name, data := range packed(t, raw) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			s.json()
			proxy := newCutter(t, s.Listener.Addr().String(), 1<<20)
			c := newClient(t, proxy.Addr().String())
			tries, sent := 0, int64(0)
			v := testtool.Must(c.Upload(t.Context(), "vm", bytes.NewReader(data), int64(len(data)),
				client.UploadOptions{Again: func(error) { tries++ },
					Sent: func(n int64) { sent = n }}))(t)
			require.NotZero(t, tries)
			require.Equal(t, "vm", v.Info.Name)
			require.EqualValues(t, len(data), sent)
			require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
		})
	}
}

// TestClientGoesOn: a later call continues an interrupted upload.
func TestClientGoesOn(t *testing.T) {
	raw := rawDisk(7 << 20)
	s := newServer(t)
	s.json()
	s.volumes.add(t, "vm", 0)
	c := newClient(t, s.Listener.Addr().String())
	ctx, cancel := context.WithCancel(t.Context())
	_, err := c.Upload(ctx, "vm", bytes.NewReader(raw), int64(len(raw)),
		client.UploadOptions{Sent: func(n int64) {
			if n >= 2<<20 {
				cancel()
			}
		}})
	require.ErrorIs(t, err, context.Canceled)
	testtool.Eventually(t, func() bool { // the server may not have started on the data yet
		return s.handler.Totals().Bytes > 0 && len(s.handler.Receiving()) == 0
	})
	before := s.handler.Totals().Bytes

	_, err = c.Upload(t.Context(), "vm", bytes.NewReader(raw[:5<<20]), 5<<20,
		client.UploadOptions{})
	require.ErrorContains(t, err, "another file")

	changed := bytes.Clone(raw)
	changed[100] ^= 1
	_, err = c.Upload(t.Context(), "vm", bytes.NewReader(changed), int64(len(raw)),
		client.UploadOptions{})
	require.ErrorContains(t, err, "Repr-Digest")
	s.requireEmpty(t, "vm")
	require.Less(t, s.handler.Totals().Bytes-before, uint64(len(raw)), "it did not go on")

	_, err = c.Upload(t.Context(), "vm", bytes.NewReader(raw), int64(len(raw)),
		client.UploadOptions{})
	require.NoError(t, err)
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
}

// TestClientOfAChangedFile: a file that is changed while it is sent makes no volume, although its
// digest is that of what was sent.
func TestClientOfAChangedFile(t *testing.T) {
	raw := rawDisk(7 << 20)
	s := newServer(t)
	s.json()
	s.volumes.add(t, "vm", 0)
	c := newClient(t, s.Listener.Addr().String())
	path := filepath.Join(t.TempDir(), "disk.raw")
	require.NoError(t, os.WriteFile(path, raw, 0o600))
	require.NoError(t, os.Chtimes(path, time.Now(), time.Now().Add(-time.Hour)))
	f := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
	defer f.Close()
	change := sync.OnceFunc(func() { _ = testtool.Must(f.WriteAt([]byte("new"), 0))(t) })
	opt := client.UploadOptions{Sent: func(n int64) {
		if n >= 2<<20 {
			change()
		}
	}}
	_, err := c.Upload(t.Context(), "vm", f, int64(len(raw)), opt)
	require.ErrorContains(t, err, "the file was changed while it was sent")
	s.requireEmpty(t, "vm")
	require.NoError(t, testtool.Err(c.Upload(t.Context(), "vm", f, int64(len(raw)), opt)))
	require.True(t, bytes.Equal(testtool.Must(os.ReadFile(path))(t), s.disk(t, "vm")))
}

// TestClientAndRestart: the server restarts halfway. Packed data that it had is gone.
func TestClientAndRestart(t *testing.T) {
	raw := rawDisk(7 << 20)
	for name, data := range packed(t, raw) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			s.json()
			s.volumes.add(t, "vm", 0)
			var now atomic.Pointer[server]
			now.Store(s)
			front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				now.Load().Handler.ServeHTTP(w, r)
			}))
			defer front.Close()
			c := newClient(t, front.Listener.Addr().String())
			var once sync.Once
			_, err := c.Upload(t.Context(), "vm", bytes.NewReader(data), int64(len(data)),
				client.UploadOptions{Sent: func(n int64) {
					if n >= 3<<20 {
						once.Do(func() {
							next := s.restart(t)
							next.json()
							now.Store(next)
						})
					}
				}})
			require.NoError(t, err)
			require.True(t, bytes.Equal(raw, now.Load().disk(t, "vm")))
		})
	}
}

// TestClientIsRefused: the client returns the server's refusal at once.
func TestClientIsRefused(t *testing.T) {
	s := newServer(t)
	s.json()
	s.volumes.add(t, "vm", 1<<20)
	c := newClient(t, s.Listener.Addr().String())
	data := rawDisk(2 << 20)
	_, err := c.Upload(t.Context(), "vm", bytes.NewReader(data), int64(len(data)),
		client.UploadOptions{})
	var refused *api.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, http.StatusRequestEntityTooLarge, refused.Status)
	s.requireEmpty(t, "vm")
}

// TestClientAndProxy: a proxy answers one request of an upload in the place of the server. That is
// no end of the upload, whatever its status is.
func TestClientAndProxy(t *testing.T) {
	raw := rawDisk(2 << 20)
	for _, c := range []struct {
		at       int // the number of that request
		statuses []int
	}{{1, []int{204, 503}}, {2, []int{408, 429, 503}}, {3, []int{202, 302, 408, 429, 503}},
		{4, []int{202, 204, 302, 408, 429, 503}}} {
		for _, status := range c.statuses {
			t.Run(fmt.Sprintf("%d of request %d", status, c.at), func(t *testing.T) {
				s := newServer(t)
				s.json()
				s.volumes.add(t, "vm", 0)
				n := atomic.Int32{}
				proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
					r *http.Request) {
					if int(n.Add(1)) != c.at {
						s.Handler.ServeHTTP(w, r)
						return
					}
					_, _ = io.Copy(io.Discard, r.Body)
					w.WriteHeader(status)
					_, _ = io.WriteString(w, `{"error": "log in first"}`)
				}))
				defer proxy.Close()
				up := newClient(t, proxy.Listener.Addr().String())
				require.NoError(t, testtool.Err(up.Upload(t.Context(), "vm", bytes.NewReader(raw),
					int64(len(raw)), client.UploadOptions{})))
				require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
			})
		}
	}
}

// TestClientLosesTheLastAnswer: the volume has everything, and neither the client learns of that,
// nor is its first question about the volume answered.
func TestClientLosesTheLastAnswer(t *testing.T) {
	raw := rawDisk(2 << 20)
	s := newServer(t)
	s.json()
	s.volumes.add(t, "vm", 0)
	gets := atomic.Int32{}
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Upload-Complete") == "?1":
			s.Handler.ServeHTTP(httptest.NewRecorder(), r)
			w.WriteHeader(http.StatusGatewayTimeout)
		case r.Method == http.MethodGet && gets.Add(1) == 1:
			w.WriteHeader(http.StatusBadGateway)
		case r.Method == http.MethodGet:
			_ = json.NewEncoder(w).Encode(api.Volume{Info: api.Info{State: api.StateReady}})
		default:
			s.Handler.ServeHTTP(w, r)
		}
	}))
	defer proxy.Close()
	c := newClient(t, proxy.Listener.Addr().String())
	require.NoError(t, testtool.Err(c.Upload(t.Context(), "vm", bytes.NewReader(raw),
		int64(len(raw)), client.UploadOptions{})))
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
}

// TestClientGivesUp: if nobody answers, the client says so in time.
func TestClientGivesUp(t *testing.T) {
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	c := newClient(t, l.Addr().String())
	_, err := c.Upload(t.Context(), "vm", bytes.NewReader(rawDisk(512)), 512,
		client.UploadOptions{Timeout: time.Millisecond})
	require.ErrorContains(t, err, "no progress")
}

// TestClientWaitsForAnExpansion: the answer of a server that works on an image is awaited as long
// as it answers anything, and that of a hung server is not.
func TestClientWaitsForAnExpansion(t *testing.T) {
	raw := rawDisk(7 << 20)
	for name, hung := range map[string]bool{"expands": false, "hangs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			s.json()
			end, asked := make(chan struct{}), atomic.Int32{}
			front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				switch complete := r.Header.Get("Upload-Complete") == "?1"; {
				case complete, hung && asked.Load() > 0:
					asked.Add(1)
					<-end
				case r.Method == http.MethodGet && asked.Load() > 0:
					if asked.Add(1) == 4 {
						close(end)
					}
				}
				s.Handler.ServeHTTP(w, r)
			}))
			defer front.Close()
			opt := client.UploadOptions{Timeout: 2 * time.Second}
			if hung {
				opt.Timeout = time.Millisecond
			}
			c := newClient(t, front.Listener.Addr().String())
			_, err := c.Upload(t.Context(), "vm", bytes.NewReader(raw), int64(len(raw)), opt)
			if hung {
				close(end)
				require.ErrorContains(t, err, "the server answers nothing")
				require.ErrorContains(t, err, "may still complete the volume")
				return
			}
			require.NoError(t, err)
			require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
		})
	}
}

// busyClient begins an upload, and sends without looking for an answer.
type busyClient struct {
	net.Conn
	chunked bool
	piece   []byte
}

func (s *server) busy(t *testing.T, volume string, length int64, piece []byte) *busyClient {
	t.Helper()
	c := testtool.Must(net.Dial("tcp", s.Listener.Addr().String()))(t)
	t.Cleanup(func() { _ = c.Close() })
	size := fmt.Sprintf("Content-Length: %d", length)
	if length < 0 {
		size = "Transfer-Encoding: chunked"
	}
	_, err := fmt.Fprintf(c, "PUT /volume/%s/data HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", volume, size)
	require.NoError(t, err)
	return &busyClient{c, length < 0, piece}
}

// send sends the piece again.
func (c *busyClient) send() error {
	head, tail := "", ""
	if c.chunked {
		head, tail = fmt.Sprintf("%x\r\n", len(c.piece)), "\r\n"
	}
	_, err := c.Write(append(append([]byte(head), c.piece...), tail...))
	return err
}

// TestRefusalReachesABusyClient: a client that sends far more than all buffers hold before it looks
// for an answer still learns why it was refused.
func TestRefusalReachesABusyClient(t *testing.T) {
	s := newServer(t)
	s.handler.timeout = timeout // the machine may be slow
	s.volumes.add(t, "small", 1<<20)
	s.volumes.add(t, "vm", 0)
	s.create(t, "taken", -1)
	raw := rawDisk(1 << 20)
	for name, test := range map[string]struct {
		volume string
		length int64
		piece  []byte
		status int
	}{
		"before a byte was taken": {"small", 1 << 30, raw, http.StatusRequestEntityTooLarge},
		"in the middle":           {"small", -1, raw, http.StatusRequestEntityTooLarge},
		"not its turn":            {"taken", 1 << 30, raw, http.StatusConflict},
		"no disk": {"vm", 1 << 30, append([]byte("QED\x00"), raw...),
			http.StatusUnprocessableEntity},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.busy(t, test.volume, test.length, test.piece)
			for range 48 {
				require.NoError(t, c.send())
			}
			back := testtool.Must(http.ReadResponse(bufio.NewReader(c), nil))(t)
			defer back.Body.Close()
			require.Equal(t, test.status, back.StatusCode)
			require.NotEmpty(t, testtool.Must(io.ReadAll(back.Body))(t))
		})
	}
}

// TestRefusedClientMustStop: the server does not read all of a refused upload.
func TestRefusedClientMustStop(t *testing.T) {
	s := newServer(t)
	s.volumes.add(t, "small", 1<<20)
	const length = 1 << 30
	c := s.busy(t, "small", length, rawDisk(1<<20))
	for range length >> 20 {
		if c.send() != nil {
			return
		}
	}
	t.Fatal("everything was taken")
}
