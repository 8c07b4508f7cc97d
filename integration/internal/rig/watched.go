package rig

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// WatchedRegistry is a docker-registry behind a proxy that records requests.
type WatchedRegistry struct {
	*registryServer
	Proxy string // address

	mu   sync.Mutex
	said map[string]int // requests of blobs, with their ranges; guarded by mu
	Sent atomic.Int64   // bytes of blobs

	Received atomic.Int64 // bytes of all requests

	Hold sync.RWMutex // while it is held for writing, nobody gets a blob

	Flips atomic.Bool // one bit in each part of a blob is wrong
}

func NewWatchedRegistry(t *testing.T) *WatchedRegistry {
	w := &WatchedRegistry{registryServer: StartRegistry(t, false, ""), said: map[string]int{}}
	forward := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: w.Address})
	forward.ErrorHandler = func(http.ResponseWriter, *http.Request,
		error) {
		panic(http.ErrAbortHandler)
	}
	forward.ModifyResponse = w.flip
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			w.mu.Lock()
			w.said[r.URL.Path+" "+r.Header.Get("Range")]++
			w.mu.Unlock()
			w.Hold.RLock()
			defer w.Hold.RUnlock()
			rw = &countedResponse{rw, &w.Sent}
		}
		r.Body = &CountedBody{r.Body, &w.Received}
		forward.ServeHTTP(rw, r)
	}))
	t.Cleanup(server.Close)
	w.Proxy = strings.TrimPrefix(server.URL, "http://")
	return w
}

// CountedBody counts the bytes of a request that are read.
type CountedBody struct {
	io.ReadCloser
	N *atomic.Int64
}

func (c *CountedBody) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.N.Add(int64(n))
	return n, err
}

// countedResponse counts the bytes of an answer.
type countedResponse struct {
	http.ResponseWriter
	sent *atomic.Int64
}

func (c *countedResponse) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.sent.Add(int64(n))
	return n, err
}

// Unwrap gives the proxy the other methods of the writer.
func (c *countedResponse) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// flip makes a bit of an answer wrong.
func (w *WatchedRegistry) flip(res *http.Response) error {
	if r := res.Request; w.Flips.Load() && r.Method == http.MethodGet &&
		strings.Contains(r.URL.Path, "/blobs/") && res.ContentLength > 10000 {
		res.Body = &flippedBody{ReadCloser: res.Body, at: res.ContentLength / 2}
	}
	return nil
}

// flippedBody has one wrong bit.
type flippedBody struct {
	io.ReadCloser
	at int64
}

func (b *flippedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.at >= 0 && b.at < int64(n) {
		p[b.at] ^= 1
	}
	b.at -= int64(n)
	return n, err
}

// Asked returns how many requests for blobs there were.
func (w *WatchedRegistry) Asked() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, times := range w.said {
		n += times
	}
	return n
}

func (w *WatchedRegistry) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.said)
}

// NewFullDisk is newDisk with content everywhere, so that opening it does not fetch most of it.
func NewFullDisk(t *testing.T) (raw, qcow2 string) {
	t.Helper()
	dir := t.TempDir()
	raw, qcow2 = filepath.Join(dir, "fedora.raw"), filepath.Join(dir, "fedora.qcow2")
	content := make([]byte, 24<<20)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(content)
	for i := range content { // only half of it, so that clusters can be compressed
		content[i] &= 0x0f
	}
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	MakeQcow2(t, raw, qcow2, "", true)
	return raw, qcow2
}

func Push(t *testing.T, address string, files ...string) {
	t.Helper()
	args := append([]string{"push", "--base=none", "--insecure-registry=" + address}, files...)
	MustRun(t, nil, append(args, address+"/vm/fedora:42")...)
}

// NewLargeDisk makes a raw disk that is so large that it is not fetched just to look into it.
func NewLargeDisk(t *testing.T) string {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "large.raw")
	content := make([]byte, 40<<20)
	random := rand.NewChaCha8([32]byte{2})
	_, _ = random.Read(content)
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	return raw
}

// PushPlain pushes an image with an uncompressed layer without an index.
func PushPlain(t *testing.T, address, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	require.NoError(t, w.WriteHeader(&tar.Header{Name: "disk/" + filepath.Base(file), Mode: 0o444,
		Size: int64(len(content)), Typeflag: tar.TypeReg}))
	_, err = w.Write(content)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	describe := func(content []byte, kind string) string {
		send(t, address, content)
		return fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.%s","size":%d,`+
			`"digest":"sha256:%x"}`, kind, len(content), sha256.Sum256(content))
	}
	put(t, "http://"+address+"/v2/vm/fedora/manifests/42",
		"application/vnd.oci.image.manifest.v1+json", []byte(`{"schemaVersion":2,`+
			`"mediaType":"application/vnd.oci.image.manifest.v1+json","config":`+
			describe([]byte("{}"), "config.v1+json")+`,"layers":[`+
			describe(layer.Bytes(), "layer.v1.tar")+`]}`))
}

// send uploads a blob in one request.
func send(t *testing.T, address string, content []byte) {
	t.Helper()
	res, err := http.Post("http://"+address+"/v2/vm/fedora/blobs/uploads/", "", nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	put(t, fmt.Sprintf("%s&digest=sha256:%x", res.Header.Get("Location"), sha256.Sum256(content)),
		"application/octet-stream", content)
}

func put(t *testing.T, address, kind string, content []byte) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, address, bytes.NewReader(content))
	require.NoError(t, err)
	req.Header.Set("Content-Type", kind)
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusCreated, res.StatusCode)
}

// registryServer is a registry for a test, which can end and begin again.
type registryServer struct {
	Address string
	dir     string
	CA      string // file; "": no TLS
	config  string
	cmd     *exec.Cmd
}

// StartRegistry starts a registry with more settings, in YAML.
func StartRegistry(t *testing.T, withTLS bool, auth string) *registryServer {
	t.Helper()
	port := testtool.Must(peers.FreePort())(t)
	s := &registryServer{Address: fmt.Sprintf("127.0.0.1:%d", port), dir: t.TempDir()}
	tls := ""
	if withTLS {
		s.CA = filepath.Join(s.dir, "ca.pem")
		key := filepath.Join(s.dir, "key.pem")
		MakeCertificate(t, s.CA, key)
		tls = fmt.Sprintf(", tls: {certificate: %q, key: %q}", s.CA, key)
	}
	config := filepath.Join(s.dir, "config.yml")
	require.NoError(
		t,
		os.WriteFile(config, []byte(fmt.Sprintf("version: 0.1\nlog: {level: error}\n"+
			"storage: {filesystem: {rootdirectory: %q}}\nhttp: {addr: %q%s}\n%s",
			filepath.Join(s.dir, "data"), s.Address, tls, auth)), 0o644),
	)
	s.config = config
	s.Run(t)
	t.Cleanup(s.Kill)
	return s
}

// Run starts it, or starts it again after kill with the data that it has stored.
func (s *registryServer) Run(t *testing.T) {
	t.Helper()
	s.cmd = exec.Command(registryProgram(t), "serve", s.config)
	s.cmd.Env = ClientEnv()
	require.NoError(t, s.cmd.Start())
	testtool.Within(t, Timeout, func() bool {
		c, err := net.Dial("tcp", s.Address)
		if err != nil {
			return false
		}
		return c.Close() == nil
	}, "the registry listens")
}

// Kill ends it, if it runs.
func (s *registryServer) Kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// Layer is a layer of an image in a registry.
type Layer struct {
	Digest string
	Size   int64
}

// Layers returns the layers of an image, or of the first one of an index.
func (w *WatchedRegistry) Layers(t *testing.T, repository, tagOrDigest string) []Layer {
	t.Helper()
	req := testtool.Must(http.NewRequestWithContext(t.Context(), http.MethodGet,
		"http://"+w.Address+"/v2/"+repository+"/manifests/"+tagOrDigest, nil))(t)
	req.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json, "+
		"application/vnd.oci.image.index.v1+json")
	res := testtool.Must(http.DefaultClient.Do(req))(t)
	defer res.Body.Close()
	var says struct {
		Manifests []struct{ Digest string }
		Layers    []Layer
	}
	require.NoError(t, json.NewDecoder(res.Body).Decode(&says))
	if len(says.Manifests) > 0 {
		return w.Layers(t, repository, says.Manifests[0].Digest)
	}
	require.NotEmpty(t, says.Layers)
	return says.Layers
}
