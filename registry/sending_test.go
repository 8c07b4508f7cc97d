package registry

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// uploads are the upload sessions of a registry, because those of the registry in memory end with
// their connection. They keep what has arrived of a piece, as OCI's specification says. A strict
// one is like distribution 2, where the upload is lost then.
type uploads struct {
	m      *memory
	strict bool
	// during gets how much of all pieces has arrived, and ends the connection if it returns true.
	during func(received int64) (cut bool)

	mu       sync.Mutex
	sessions map[string]*bytes.Buffer // guarded by mu
	begun    int                      // guarded by mu
	received int64                    // of all pieces; guarded by mu
	lie      int64                    // added to the reported amount, once; guarded by mu
	limit    int64                    // largest piece, 0: no limit; guarded by mu
}

const uploadState = "s3cret"

func newUploads(m *memory) *uploads {
	u := &uploads{m: m, sessions: make(map[string]*bytes.Buffer)}
	m.fault = u.serve
	return u
}

// forget drops all sessions, and counts anew.
func (u *uploads) forget(sessions bool) (received int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if sessions {
		u.sessions = make(map[string]*bytes.Buffer)
	}
	received, u.received = u.received, 0
	return received
}

func (u *uploads) answer(w http.ResponseWriter, id string, size int64, status int) {
	w.Header().Set("Location", "/v2/vm/a/blobs/uploads/"+id+"?_state="+uploadState)
	w.Header().Set("Range", fmt.Sprintf("0-%d", max(0, size-1)))
	w.WriteHeader(status)
}

func (u *uploads) serve(w http.ResponseWriter, r *http.Request) bool {
	_, id, ok := strings.Cut(r.URL.Path, "/blobs/uploads/")
	if !ok {
		return false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if r.Method == http.MethodPost {
		u.begun++
		id = fmt.Sprint(u.begun)
		u.sessions[id] = new(bytes.Buffer)
		u.answer(w, id, 0, http.StatusAccepted)
		return true
	}
	all := u.sessions[id]
	if all == nil || r.URL.Query().Get("_state") != uploadState {
		w.WriteHeader(http.StatusNotFound)
		return true
	}
	switch r.Method {
	case http.MethodGet:
		u.answer(w, id, int64(all.Len())+u.lie, http.StatusNoContent)
		all.Write(make([]byte, u.lie)) // and so it is, but it is not what was sent
		u.lie = 0
	case http.MethodPatch:
		u.patch(w, r, id, all)
	case http.MethodPut:
		delete(u.sessions, id)
		at := "/v2/vm/a/blobs/uploads/?digest=" + r.URL.Query().Get("digest")
		_, _ = all.ReadFrom(r.Body)
		whole := httptest.NewRequest(http.MethodPost, at, bytes.NewReader(all.Bytes()))
		u.m.handler.ServeHTTP(w, whole)
	}
	return true
}

func (u *uploads) patch(w http.ResponseWriter, r *http.Request, id string, all *bytes.Buffer) {
	if u.limit > 0 && r.ContentLength > u.limit {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		return
	}
	var from int64
	_, _ = fmt.Sscanf(r.Header.Get("Content-Range"), "%d-", &from)
	if from != int64(all.Len()) {
		w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		return
	}
	for {
		n, err := io.CopyN(all, r.Body, 1<<20)
		u.received += n
		cut := u.during != nil && u.during(u.received)
		if err != nil && err != io.EOF || cut {
			if u.strict {
				delete(u.sessions, id)
			}
			panic(http.ErrAbortHandler)
		}
		if err == io.EOF {
			break
		}
	}
	u.answer(w, id, int64(all.Len()), http.StatusAccepted)
}

// pushTry pushes one uncompressed disk of several pieces.
type pushTry struct {
	m    *memory
	u    *uploads
	file string
	dir  string // for the notes on uploads
	told warnings
}

const pushedSize = 18 << 20

func newPushTry(t *testing.T) *pushTry {
	p := &pushTry{m: newMemory(t), dir: filepath.Join(t.TempDir(), "cache", "uploads"),
		file: filepath.Join(t.TempDir(), "a.img")}
	p.u = newUploads(p.m)
	require.NoError(t, os.WriteFile(p.file, noise(70, pushedSize), 0o600))
	return p
}

func (p *pushTry) push(ctx context.Context, t *testing.T) error {
	c := newClient(t, transport.Options{Insecure: []string{p.m.host}, Timeout: time.Minute,
		Warn: p.told.add})
	progress := new(Progress)
	_, err := c.Push(ctx, []string{p.file}, p.m.ref(t, "vm/a:1"),
		PushOptions{Base: BaseNone, Uploads: p.dir, Progress: progress})
	if err == nil {
		require.Equal(t, progress.Total(), progress.Done())
	}
	require.NotContains(t, strings.Join(p.told.all(), "\n"), uploadState)
	return err
}

// whole pulls the pushed disk, and checks that nothing is left of the upload.
func (p *pushTry) whole(t *testing.T) {
	emptyDir(t, p.dir)
	brings(t, p.m.client(t), p.m.ref(t, "vm/a:1"), PullOptions{}, noise(70, pushedSize))
}

// TestPushExpiredTokens: a piece whose token has expired is sent again from its beginning, with a
// new token.
func TestPushExpiredTokens(t *testing.T) {
	p := newPushTry(t)
	var mu sync.Mutex
	issued, left := 0, 0
	p.m.setFault(func(w http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		left--
		expired := left < 0 || r.Header.Get("Authorization") != fmt.Sprintf("Bearer t%d", issued)
		if r.URL.Path == "/token" {
			issued, left = issued+1, 3
			fmt.Fprintf(w, `{"token":"t%d"}`, issued)
		} else if expired {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+p.m.host+`/token"`)
			w.WriteHeader(http.StatusUnauthorized)
		}
		mu.Unlock()
		return r.URL.Path == "/token" || expired || p.u.serve(w, r)
	})
	require.NoError(t, p.push(t.Context(), t))
	require.Greater(t, issued, 3)
	require.Less(t, p.u.forget(false), int64(pushedSize+1<<20), "nothing is sent twice")
	p.m.setFault(nil)
	p.whole(t)
}

// TestPushBrokenPiece goes on inside a piece after a broken connection.
func TestPushBrokenPiece(t *testing.T) {
	p := newPushTry(t)
	cuts := []int64{3 << 20, 13 << 20, 14 << 20}
	p.u.during = func(received int64) bool {
		if len(cuts) == 0 || received < cuts[0] {
			return false
		}
		cuts = cuts[1:]
		return true
	}
	require.NoError(t, p.push(t.Context(), t))
	require.Less(t, p.u.forget(false), int64(pushedSize+1<<20), "nothing is sent twice")
	p.whole(t)
}

// interrupt begins a push and ends it when more than half of the disk has arrived.
func (p *pushTry) interrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p.u.during = func(received int64) bool {
		if received <= pushedSize*3/5 {
			return false
		}
		cancel()
		return !p.u.strict
	}
	require.ErrorIs(t, p.push(ctx, t), context.Canceled)
	require.Greater(t, p.u.forget(false), int64(pushedSize/2))
	p.u.during = nil
	left := testtool.Must(os.ReadDir(p.dir))(t)
	require.Len(t, left, 1)
	info := testtool.Must(left[0].Info())(t)
	require.Equal(t, fs.FileMode(0o600), info.Mode(), "who has the address can send to it")
	require.Contains(t, string(bytesOf(t, filepath.Join(p.dir, left[0].Name()))), uploadState)
}

// TestPushGoesOnInBlob interrupts a push. The next one sends only what is missing; without the
// notes it sends everything.
func TestPushGoesOnInBlob(t *testing.T) {
	for name, c := range map[string]struct {
		strict bool
		all    bool // everything must be sent
		change func(t *testing.T, p *pushTry)
	}{
		"goes on":        {change: func(*testing.T, *pushTry) {}},
		"distribution 2": {strict: true, change: func(*testing.T, *pushTry) {}},
		"session gone": {all: true, change: func(_ *testing.T, p *pushTry) {
			p.u.forget(true)
		}},
		"registry lies": {all: true, change: func(_ *testing.T, p *pushTry) {
			p.u.lie = 100
		}},
		"more than there is": {all: true, change: func(_ *testing.T, p *pushTry) {
			p.u.lie = pushedSize
		}},
		"damaged": {all: true, change: func(t *testing.T, p *pushTry) {
			left := testtool.Must(os.ReadDir(p.dir))(t)
			require.NoError(t, os.WriteFile(filepath.Join(p.dir, left[0].Name()),
				[]byte("\x00nonsense\n"), 0o600))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPushTry(t)
			p.u.strict = c.strict
			p.interrupt(t)
			c.change(t, p)
			require.NoError(t, p.push(t.Context(), t))
			if sent := p.u.forget(false); c.all {
				require.GreaterOrEqual(t, sent, int64(pushedSize))
			} else {
				require.Less(t, sent, int64(pushedSize/2))
			}
			p.whole(t)
		})
	}
}

// TestPushSmallerPieces sends smaller pieces if something on the way refuses larger ones.
func TestPushSmallerPieces(t *testing.T) {
	p := newPushTry(t)
	p.u.limit = 8 << 20
	require.NoError(t, p.push(t.Context(), t))
	require.Less(t, p.u.forget(false), int64(pushedSize+1<<20))
	p.whole(t)

	p = newPushTry(t)
	p.u.limit = 1<<20 - 1
	require.ErrorContains(t, p.push(t.Context(), t), "413")
}

// pieceFault has a registry treat pieces as some real ones do.
func pieceFault(p *pushTry, patch func(w http.ResponseWriter, r *http.Request) bool) {
	p.m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPatch && patch(w, r) {
			return true
		}
		return p.u.serve(w, r)
	}
}

// TestPushLosesAnswers: the blob that a registry has taken in one request is not sent again where
// only the answer was lost, and an upload that the registry has forgotten before the first piece
// begins anew.
func TestPushLosesAnswers(t *testing.T) {
	p := newPushTry(t)
	wholes, forgotten := 0, false
	p.m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		further := !strings.HasPrefix(r.Header.Get("Content-Range"), "0-")
		switch {
		case r.Method == http.MethodPatch && !forgotten:
			forgotten = true
			p.u.forget(true)
		case r.Method == http.MethodPatch && further:
			_, _ = io.Copy(io.Discard, r.Body) // it keeps no pieces
			w.Header().Set("Location", r.URL.String())
			w.Header().Set("Range", "0-8388607")
			w.WriteHeader(http.StatusAccepted)
			return true
		case r.Method == http.MethodPut && r.ContentLength > pushedSize:
			wholes++
			p.u.serve(httptest.NewRecorder(), r)
			w.WriteHeader(http.StatusGatewayTimeout)
			return true
		}
		return p.u.serve(w, r)
	}
	require.NoError(t, p.push(t.Context(), t))
	require.True(t, forgotten)
	require.Equal(t, 1, wholes)
	p.whole(t)
}

// created changes 202 into 201.
type created struct{ http.ResponseWriter }

func (c created) WriteHeader(status int) {
	if status == http.StatusAccepted {
		status = http.StatusCreated
	}
	c.ResponseWriter.WriteHeader(status)
}

// TestPushPieces sends blobs to registries that answer pieces in ways of their own.
func TestPushPieces(t *testing.T) {
	t.Run("201", func(t *testing.T) {
		p := newPushTry(t)
		p.m.fault = func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPatch {
				w = created{w}
			}
			return p.u.serve(w, r)
		}
		require.NoError(t, p.push(t.Context(), t))
		p.whole(t)
	})
	for status, limit := range map[int]int64{http.StatusRequestEntityTooLarge: 1 << 20,
		http.StatusRequestedRangeNotSatisfiable: 4 << 20} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			p := newPushTry(t)
			pieceFault(p, func(w http.ResponseWriter, r *http.Request) bool {
				if r.ContentLength > limit {
					w.WriteHeader(status)
					return true
				}
				return false
			})
			require.NoError(t, p.push(t.Context(), t))
			p.whole(t)
		})
	}
	for what, status := range map[string]int{"drops": 202, "refuses with 416": 416,
		"refuses with 404": 404, "refuses with 405": 405} {
		t.Run(what, func(t *testing.T) {
			p := newPushTry(t)
			pieceFault(p, func(w http.ResponseWriter, r *http.Request) bool {
				if strings.HasPrefix(r.Header.Get("Content-Range"), "0-") {
					return false
				}
				_, _ = io.Copy(io.Discard, r.Body)
				if status == http.StatusAccepted {
					w.Header().Set("Location", r.URL.String())
				}
				w.WriteHeader(status)
				return true
			})
			require.NoError(t, p.push(t.Context(), t))
			p.whole(t)
		})
	}
}
