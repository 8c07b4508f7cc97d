package registry

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestPushGoesOn: a push survives broken connections, answers that ask to wait, and uploads that
// the registry has forgotten.
func TestPushGoesOn(t *testing.T) {
	for name, fault := range map[string]func(n int, w http.ResponseWriter, r *http.Request) bool{
		"429": func(n int, w http.ResponseWriter, r *http.Request) bool {
			if n%5 == 0 {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(http.StatusTooManyRequests)
			}
			return n%5 == 0
		},
		"cut": func(n int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPatch && n%5 == 0 {
				_, _ = io.CopyN(io.Discard, r.Body, 10)
				panic(http.ErrAbortHandler)
			}
			return false
		},
		"cut behind": func(n int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPut && n%5 == 0 {
				panic(http.ErrAbortHandler)
			}
			return false
		},
		"forgotten": func(n int, w http.ResponseWriter, r *http.Request) bool {
			gone := strings.Contains(r.URL.Path, "/uploads/") &&
				(r.Method == http.MethodPatch && n < 9 || r.Method == http.MethodGet)
			if gone && r.Method == http.MethodPatch {
				w.WriteHeader(http.StatusInternalServerError)
			} else if gone {
				w.WriteHeader(http.StatusNotFound)
			}
			return gone
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			_, files, contents := diskFiles(t)
			n := 0
			m.fault = func(w http.ResponseWriter, r *http.Request) bool {
				m.mu.Lock()
				n++
				now := n
				m.mu.Unlock()
				return fault(now, w, r)
			}
			base, _ := newBase(t)
			require.NoError(t, testtool.Err(m.client(t).
				Push(context.Background(), files, m.ref(t, "vm/a:1"),
					PushOptions{Base: base.String()})))
			m.fault = nil
			dir := t.TempDir()
			require.NoError(t, testtool.Err2(m.client(t).
				Pull(context.Background(), m.ref(t, "vm/a:1"), dir, PullOptions{})))
			for name, want := range contents {
				require.True(t, bytes.Equal(want, bytesOf(t, filepath.Join(dir, name))), name)
			}
		})
	}
}

// TestPushInterrupted: the tag appears when everything is there, and the same push goes on.
func TestPushInterrupted(t *testing.T) {
	m := newMemory(t)
	_, files, _ := diskFiles(t)
	ctx, cancel := context.WithCancel(context.Background())
	patches := 0
	m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPatch {
			if patches++; patches == 3 {
				cancel()
				panic(http.ErrAbortHandler)
			}
		}
		return false
	}
	_, err := m.client(t).Push(ctx, files, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, m.requests("PUT", "/manifests/"))
	m.fault = nil
	require.NoError(t, testtool.Err(m.client(t).
		Push(context.Background(), files, m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})))
	require.Equal(t, 4, m.requests("PATCH", ""), "two layers, and two configurations")
}

// TestPushMountRefused: blobs that the registry does not let us mount are sent, whatever it says.
func TestPushMountRefused(t *testing.T) {
	for _, status := range []int{400, 401, 403, 404, 405, 500} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			m := newMemory(t)
			u := newUploads(m)
			mounts := 0
			m.fault = func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodPost && r.URL.Query().Has("mount") {
					mounts++
					w.WriteHeader(status)
					return true
				}
				return u.serve(w, r)
			}
			content := noise(71, 1<<20)
			h, _ := testtool.Must2(v1.SHA256(bytes.NewReader(content)))(t)
			desc := v1.Descriptor{Digest: h, Size: int64(len(content))}
			up := testtool.Must(m.client(t).Uploader(m.ref(t, "vm/a:1"), m.ref(t, "vm/base:1"),
				new(atomic.Int64), ""))(t)
			require.NoError(t, up.Blob(t.Context(), desc, bytes.NewReader(content)))
			require.Equal(t, 1, mounts)
			src := testtool.Must(m.client(t).Source(m.ref(t, "vm/a:1"), ""))(t)
			b := testtool.Must(src.Blob(desc))(t)
			require.NoError(t, b.Fill(t.Context(), make([]byte, len(content)), 0))
		})
	}
}

// TestPushForgottenForEver: a registry that takes the first piece of a blob, breaks off at the next
// one, and knows nothing of either then, is not asked for ever.
func TestPushForgottenForEver(t *testing.T) {
	m := newMemory(t)
	u := newUploads(m)
	m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		switch r.Method {
		case http.MethodPatch:
			if !strings.HasPrefix(r.Header.Get("Content-Range"), "0-") {
				panic(http.ErrAbortHandler)
			}
		case http.MethodGet:
			u.forget(true)
		}
		return u.serve(w, r)
	}
	content := make([]byte, 65<<20) // more than the largest piece
	h, _ := testtool.Must2(v1.SHA256(bytes.NewReader(content)))(t)
	up := testtool.Must(m.client(t).Uploader(m.ref(t, "vm/a:1"), m.ref(t, "vm/a:1"),
		new(atomic.Int64), ""))(t)
	err := up.Blob(t.Context(), v1.Descriptor{Digest: h, Size: int64(len(content))},
		bytes.NewReader(content))
	require.ErrorContains(t, err, "404")
	require.Equal(t, 5, m.requests("POST", "/uploads/"))
}
