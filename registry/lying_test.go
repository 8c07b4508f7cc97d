package registry

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
)

// lying is a registry that misbehaves as real ones do.
type lying struct {
	store
	tags map[string]v1.Descriptor

	mu     sync.Mutex
	said   []string       // method, host and path of each request; guarded by mu
	faults []fault        // for the next requests of a blob; guarded by mu
	auth   []string       // the credentials that the storage got; guarded by mu
	tokens map[string]int // how many requests each is good for; guarded by mu
	issued int
	sent   int64 // bytes of blobs; guarded by mu

	noRanges  bool // always sends everything
	token     bool // wants a token, and each is good for a few requests
	basic     string
	elsewhere string // address that blobs redirect to; "": they are here

	server, storage *httptest.Server
}

// fault answers a request of a blob in place of the registry. If it returns false, the registry
// answers.
type fault func(w http.ResponseWriter, r *http.Request, content []byte) bool

func newLying(t testing.TB) *lying {
	l := &lying{store: store{}, tags: map[string]v1.Descriptor{}, tokens: map[string]int{}}
	l.server = httptest.NewServer(http.HandlerFunc(l.handle))
	t.Cleanup(l.server.Close)
	l.storage = httptest.NewServer(http.HandlerFunc(l.blobElsewhere))
	t.Cleanup(l.storage.Close)
	return l
}

func (l *lying) host() string { return l.server.Listener.Addr().String() }

func (l *lying) ref(t testing.TB, name string) Reference {
	ref, err := ParseReference(l.host() + "/" + name)
	require.NoError(t, err)
	return ref
}

func (l *lying) options() Options { return Options{Insecure: []string{l.host()}} }

// requests counts those whose text contains part.
func (l *lying) requests(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.said {
		if strings.Contains(s, part) {
			n++
		}
	}
	return n
}

func (l *lying) handle(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	l.said = append(l.said, r.Method+" "+r.URL.Path)
	l.mu.Unlock()
	if r.URL.Path == "/token" {
		l.issue(w, r)
		return
	}
	if !l.allowed(w, r) {
		return
	}
	kind, name := "", ""
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/v2/"), "/")
	if len(parts) > 2 {
		kind, name = parts[len(parts)-2], parts[len(parts)-1]
	}
	switch kind {
	case "":
	case "manifests":
		if desc, ok := l.tags[name]; ok {
			name = desc.Digest.String()
		}
		content, ok := l.store[name]
		if !ok {
			http.Error(
				w,
				`{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`,
				http.StatusNotFound,
			)
			return
		}
		var says struct{ MediaType string }
		_ = json.Unmarshal(content, &says)
		w.Header().Set("Content-Type", says.MediaType)
		_, _ = w.Write(content)
	case "blobs":
		if l.elsewhere != "" {
			http.Redirect(
				w,
				r,
				l.elsewhere+"/"+name+"?signature=secret",
				http.StatusTemporaryRedirect,
			)
			return
		}
		l.blob(w, r, name)
	}
}

func (l *lying) blobElsewhere(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	l.auth = append(l.auth, r.Header.Get("Authorization"))
	l.mu.Unlock()
	l.blob(w, r, strings.TrimPrefix(r.URL.Path, "/"))
}

// blob sends a blob or a range of it, unless it is time for a fault.
func (l *lying) blob(w http.ResponseWriter, r *http.Request, digest string) {
	l.mu.Lock()
	content, ok := l.store[digest]
	l.mu.Unlock()
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	l.mu.Lock()
	var next fault
	if len(l.faults) > 0 && len(content) > 1000 {
		next, l.faults = l.faults[0], l.faults[1:]
	}
	l.mu.Unlock()
	if next != nil && next(w, r, content) {
		return
	}
	l.send(w, r, content)
}

func (l *lying) send(w http.ResponseWriter, r *http.Request, content []byte) {
	first, last, ok := rangeOf(r, len(content))
	if !ok || l.noRanges {
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		l.count(w.Write(content))
		return
	}
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(content)))
	w.Header().Set("Content-Length", strconv.Itoa(last-first+1))
	w.WriteHeader(http.StatusPartialContent)
	l.count(w.Write(content[first : last+1]))
}

func (l *lying) count(n int, _ error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent += int64(n)
}

// sentSince tells how many bytes of blobs were sent since its last call.
func (l *lying) sentSince() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.sent
	l.sent = 0
	return n
}

func rangeOf(r *http.Request, size int) (first, last int, ok bool) {
	n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last)
	return first, min(last, size-1), n == 2
}

// cut ends the connection after a part of the answer.
func cut(after int) fault {
	return func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		first, last, ok := rangeOf(r, len(content))
		if !ok {
			return false
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(content)))
		w.Header().Set("Content-Length", strconv.Itoa(last-first+1))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(content[first:min(first+after, last+1)])
		panic(http.ErrAbortHandler)
	}
}

// says answers with a status.
func says(status int, header ...string) fault {
	return func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `{"errors":[{"code":"TEST","message":"a test"}]}`)
		return true
	}
}

// issue gives a token to a client with the password.
func (l *lying) issue(w http.ResponseWriter, r *http.Request) {
	if user, password, _ := r.BasicAuth(); l.basic != "" && user+":"+password != l.basic {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.issued++
	token := fmt.Sprintf("token%d", l.issued)
	l.tokens[token] = 3
	_ = json.NewEncoder(w).Encode(map[string]string{"token": token})
}

// allowed checks the credentials of a request.
func (l *lying) allowed(w http.ResponseWriter, r *http.Request) bool {
	switch {
	case l.token:
		l.mu.Lock()
		token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		good := l.tokens[token] > 0
		l.tokens[token]--
		l.mu.Unlock()
		if good {
			return true
		}
		w.Header().
			Set("WWW-Authenticate",
				fmt.Sprintf(`Bearer realm="%s/token",service="test",scope="repository:vm/a:pull"`,
					l.server.URL))
	case l.basic != "":
		if user, password, _ := r.BasicAuth(); user+":"+password == l.basic {
			return true
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	default:
		return true
	}
	w.WriteHeader(http.StatusUnauthorized)
	return false
}
