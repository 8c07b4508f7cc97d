// Package registrytest has a registry that lies in each way that a test names, and makers of
// layers, images and disks. Tests of registry and of what is below it call it; it imports none of
// them.
package registrytest

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
)

// Lying is a registry that misbehaves as real ones do.
type Lying struct {
	Store
	Tags map[string]v1.Descriptor

	Mu     sync.Mutex
	said   []string       // method, host and path of each request; guarded by Mu
	Faults []Fault        // for the next requests of a blob; guarded by Mu
	Auth   []string       // the credentials that the storage got; guarded by Mu
	tokens map[string]int // how many requests each is good for; guarded by Mu
	issued int
	sent   int64 // bytes of blobs; guarded by Mu

	NoRanges  bool // always sends everything
	Token     bool // wants a token, and each is good for a few requests
	Basic     string
	Referrers bool   // answers what refers to a manifest, by the tag that stands for it
	Elsewhere string // address that blobs redirect to; "": they are here

	Server, Storage *httptest.Server
}

// Fault answers a request of a blob in place of the registry. If it returns false, the registry
// answers.
type Fault func(w http.ResponseWriter, r *http.Request, content []byte) bool

func NewLying(t testing.TB) *Lying {
	l := &Lying{Store: Store{}, Tags: map[string]v1.Descriptor{}, tokens: map[string]int{}}
	l.Server = httptest.NewServer(http.HandlerFunc(l.Handle))
	t.Cleanup(l.Server.Close)
	l.Storage = httptest.NewServer(http.HandlerFunc(l.blobElsewhere))
	t.Cleanup(l.Storage.Close)
	return l
}

func (l *Lying) Host() string { return l.Server.Listener.Addr().String() }

// Requests counts those whose text contains part.
func (l *Lying) Requests(part string) (n int) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	for _, s := range l.said {
		if strings.Contains(s, part) {
			n++
		}
	}
	return n
}

func (l *Lying) Handle(w http.ResponseWriter, r *http.Request) {
	l.Mu.Lock()
	l.said = append(l.said, r.Method+" "+r.URL.Path)
	l.Mu.Unlock()
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
		if desc, ok := l.Tags[name]; ok {
			name = desc.Digest.String()
		}
		content, ok := l.Store[name]
		if !ok {
			http.Error(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`,
				http.StatusNotFound)
			return
		}
		var says struct{ MediaType string }
		_ = json.Unmarshal(content, &says)
		w.Header().Set("Content-Type", says.MediaType)
		_, _ = w.Write(content)
	case "referrers":
		desc, ok := l.Tags[strings.Replace(name, ":", "-", 1)]
		if !ok || !l.Referrers {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", string(types.OCIImageIndex))
		_, _ = w.Write(l.Store[desc.Digest.String()])
	case "blobs":
		if l.Elsewhere != "" {
			http.Redirect(w, r, l.Elsewhere+"/"+name+"?signature=secret",
				http.StatusTemporaryRedirect)
			return
		}
		l.blob(w, r, name)
	}
}

func (l *Lying) blobElsewhere(w http.ResponseWriter, r *http.Request) {
	l.Mu.Lock()
	l.Auth = append(l.Auth, r.Header.Get("Authorization"))
	l.Mu.Unlock()
	l.blob(w, r, strings.TrimPrefix(r.URL.Path, "/"))
}

// blob sends a blob or a range of it, unless it is time for a fault.
func (l *Lying) blob(w http.ResponseWriter, r *http.Request, digest string) {
	l.Mu.Lock()
	content, ok := l.Store[digest]
	l.Mu.Unlock()
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	l.Mu.Lock()
	var next Fault
	if len(l.Faults) > 0 && len(content) > 1000 {
		next, l.Faults = l.Faults[0], l.Faults[1:]
	}
	l.Mu.Unlock()
	if next != nil && next(w, r, content) {
		return
	}
	l.send(w, r, content)
}

func (l *Lying) send(w http.ResponseWriter, r *http.Request, content []byte) {
	first, last, ok := RangeOf(r, len(content))
	if !ok || l.NoRanges {
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		l.count(w.Write(content))
		return
	}
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(content)))
	w.Header().Set("Content-Length", strconv.Itoa(last-first+1))
	w.WriteHeader(http.StatusPartialContent)
	l.count(w.Write(content[first : last+1]))
}

func (l *Lying) count(n int, _ error) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.sent += int64(n)
}

// SentSince tells how many bytes of blobs were sent since its last call.
func (l *Lying) SentSince() int64 {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	n := l.sent
	l.sent = 0
	return n
}

func RangeOf(r *http.Request, size int) (first, last int, ok bool) {
	n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last)
	return first, min(last, size-1), n == 2
}

// Cut ends the connection after a part of the answer.
func Cut(after int) Fault {
	return func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		first, last, ok := RangeOf(r, len(content))
		if !ok {
			return false
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(content)))
		w.Header().Set("Content-Length", strconv.Itoa(last-first+1))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(content[first:min(first+after, last+1)])
		abort(w)
		return true
	}
}

// Says answers with a status.
func Says(status int, header ...string) Fault {
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
func (l *Lying) issue(w http.ResponseWriter, r *http.Request) {
	if user, password, _ := r.BasicAuth(); l.Basic != "" && user+":"+password != l.Basic {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.issued++
	token := fmt.Sprintf("token%d", l.issued)
	l.tokens[token] = 3
	_ = json.NewEncoder(w).Encode(map[string]string{"token": token})
}

// allowed checks the credentials of a request.
func (l *Lying) allowed(w http.ResponseWriter, r *http.Request) bool {
	switch {
	case l.Token:
		l.Mu.Lock()
		token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		good := l.tokens[token] > 0
		l.tokens[token]--
		l.Mu.Unlock()
		if good {
			return true
		}
		w.Header().Set("WWW-Authenticate",
			fmt.Sprintf(`Bearer realm="%s/token",service="test",scope="repository:vm/a:pull"`,
				l.Server.URL))
	case l.Basic != "":
		if user, password, _ := r.BasicAuth(); user+":"+password == l.Basic {
			return true
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	default:
		return true
	}
	w.WriteHeader(http.StatusUnauthorized)
	return false
}

// NewImage makes the registry have vm/a:1.
func (l *Lying) NewImage(t testing.TB, content []byte) {
	l.Mu.Lock() // for requests of another process, whose order the race detector cannot know
	defer l.Mu.Unlock()
	l.Tags["1"] = l.Image(t, TarOf(t, TarFile{Name: "disk/a.img", Content: content}))
}

// Annotated makes an image of one layer.
func (l *Lying) Annotated(t testing.TB, layer []byte, annotations map[string]string) {
	desc := l.Add(layer)
	desc.MediaType, desc.Annotations = types.OCILayer, annotations
	config := l.Add([]byte("{}"))
	config.MediaType = types.OCIConfigJSON
	l.Tags["1"] = l.Manifest(t, v1.Manifest{SchemaVersion: 2, Config: config,
		MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{desc}})
}

// WantsTokens makes the registry ask for tokens of another server, which is returned.
func (l *Lying) WantsTokens(t testing.TB, realm func(tokens string) string,
	tokens http.HandlerFunc) *httptest.Server {
	server := httptest.NewServer(tokens)
	t.Cleanup(server.Close)
	inner := l.Server.Config.Handler
	l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer good" {
			inner.ServeHTTP(w, r)
			return
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(
			`Bearer realm="%s",service="a \"b\"",scope="repository:vm/a:pull"`,
			realm(server.URL)))
		w.WriteHeader(http.StatusUnauthorized)
	})
	return server
}

// Replace changes the content of a blob in the registry, but not its digest.
func (l *Lying) Replace(digest string, content []byte) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.Store[digest] = content
}

// Sends makes an answer of everything, which waits for the channel before the byte at.
func (l *Lying) Sends(at int, wait <-chan struct{}) Fault {
	return func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		l.count(w.Write(content[:at]))
		w.(http.Flusher).Flush()
		select {
		case <-wait:
		case <-r.Context().Done():
			return true
		}
		l.count(w.Write(content[at:]))
		return true
	}
}

// TLS makes the registry one with TLS, and returns a file with its certificate.
func (l *Lying) TLS(t testing.TB) (file string) {
	l.Server.Close()
	l.Server = httptest.NewTLSServer(http.HandlerFunc(l.Handle))
	t.Cleanup(l.Server.Close)
	file = filepath.Join(t.TempDir(), "ca.pem")
	text := "-----BEGIN CERTIFICATE-----\n" +
		base64.StdEncoding.EncodeToString(l.Server.Certificate().Raw) +
		"\n-----END CERTIFICATE-----\n"
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// Few sends that many bytes of the range, and breaks the connection after a while.
func Few(n int, after time.Duration) Fault {
	return func(w http.ResponseWriter, r *http.Request, p []byte) bool {
		first, last, _ := RangeOf(r, len(p))
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(p)))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(p[first:min(first+n, last+1)])
		_ = http.NewResponseController(w).Flush()
		time.Sleep(after)
		abort(w)
		return true
	}
}

// abort breaks the connection after what was written so far.
func abort(w http.ResponseWriter) {
	c := http.NewResponseController(w)
	_ = c.Flush()
	if conn, _, err := c.Hijack(); err == nil {
		_ = conn.Close()
	}
}
