package registrytest

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// Web is a web server of files, with TLS, that misbehaves as real ones do.
type Web struct {
	Server *httptest.Server

	Mu       sync.Mutex
	Files    map[string][]byte // by path; guarded by Mu
	Tag      string            // ETag of each file; guarded by Mu
	NoRanges bool              // always sends everything; guarded by Mu
	Basic    string            // USER:PASSWORD that is wanted; "": none; guarded by Mu
	Faults   []Fault           // for the next requests; guarded by Mu
	Always   Fault             // for those that have no other; guarded by Mu
	said     []*http.Request   // guarded by Mu
}

// NewWeb starts one with TLS.
func NewWeb(t testing.TB) *Web {
	w := &Web{Files: map[string][]byte{}, Tag: `"1"`}
	w.Server = httptest.NewTLSServer(w)
	t.Cleanup(w.Server.Close)
	return w
}

// NewPlainWeb starts one without TLS.
func NewPlainWeb(t testing.TB) *Web {
	w := &Web{Files: map[string][]byte{}, Tag: `"1"`}
	w.Server = httptest.NewServer(w)
	t.Cleanup(w.Server.Close)
	return w
}

// Host is its address and port.
func (w *Web) Host() string { return w.Server.Listener.Addr().String() }

// CA is a file with the certificate of the server.
func (w *Web) CA(t testing.TB) string {
	file := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: w.Server.Certificate().Raw}), 0o600))
	return file
}

// Put makes the server have a file, from now on with that tag.
func (w *Web) Put(path string, content []byte, tag string) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	w.Files[path], w.Tag = content, tag
}

// Fail sets the faults of the next requests.
func (w *Web) Fail(faults ...Fault) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	w.Faults = faults
}

// Said are the requests so far.
func (w *Web) Said() []*http.Request {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	return w.said
}

func (w *Web) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	w.Mu.Lock()
	content, ok := w.Files[r.URL.Path]
	w.said = append(w.said, r)
	noRanges, tag, want := w.NoRanges, w.Tag, w.Basic
	fault := w.Always
	if len(w.Faults) > 0 {
		fault, w.Faults = w.Faults[0], w.Faults[1:]
	}
	w.Mu.Unlock()
	user, password, _ := r.BasicAuth()
	switch {
	case fault != nil && fault(to, r, content):
		return
	case want != "" && user+":"+password != want:
		to.WriteHeader(http.StatusUnauthorized)
		return
	case !ok:
		to.WriteHeader(http.StatusNotFound)
		return
	}
	to.Header().Set("ETag", tag)
	first, last, ok := RangeOf(r, len(content))
	if !ok || noRanges {
		to.Header().Set("Content-Length", strconv.Itoa(len(content)))
		_, _ = to.Write(content)
		return
	}
	to.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(content)))
	to.Header().Set("Content-Length", strconv.Itoa(last-first+1))
	to.WriteHeader(http.StatusPartialContent)
	_, _ = to.Write(content[first : last+1])
}

// Redirects leads to another address.
func Redirects(to string) Fault {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		http.Redirect(w, r, to, http.StatusFound)
		return true
	}
}

// Lies changes headers of an answer that is right otherwise: NAME, VALUE, ...
func Lies(header ...string) Fault {
	return func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		return false
	}
}

// Refuses answers requests for parts with a status, as servers do that know no ranges.
func Refuses(status int) Fault {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		if r.Header.Get("Range") == "" {
			return false
		}
		w.WriteHeader(status)
		return true
	}
}

// Backends answers as several servers behind one name, which tell of one file different things.
func Backends(header string, values ...string) Fault {
	var n atomic.Int64
	return func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		first, last, ok := RangeOf(r, len(content))
		w.Header().Set(header, values[int(n.Add(1))%len(values)])
		if !ok {
			_, _ = w.Write(content)
			return true
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(content)))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(content[first : last+1])
		return true
	}
}

// Whole sends everything, whatever was asked for. Its length is not told.
func Whole(w http.ResponseWriter, _ *http.Request, content []byte) bool {
	w.(http.Flusher).Flush()
	_, _ = w.Write(content)
	return true
}

// OtherRange answers with bytes from elsewhere in the file.
func OtherRange(w http.ResponseWriter, _ *http.Request, content []byte) bool {
	w.Header().Set("Content-Range", fmt.Sprintf("bytes 512-1023/%d", len(content)))
	w.WriteHeader(http.StatusPartialContent)
	_, _ = w.Write(content[512:1024])
	return true
}
