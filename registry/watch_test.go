package registry

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// hangs begins an answer and does not end it: it is silent, or sends a byte now and then.
func hangs(w http.ResponseWriter, r *http.Request, status int, drip bool) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return // it has no body
	}
	if status != http.StatusPartialContent {
		_, _ = w.Write([]byte(" "))
	}
	for {
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
		if drip {
			_, _ = w.Write([]byte(" "))
		}
	}
}

// TestNothingHangs: whichever answer of a registry does not end, work ends soon.
func TestNothingHangs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(file, noise(40, 1<<20), 0o600))
	works := map[string]func(context.Context, *Client, transport.Reference) error{
		"pull": func(ctx context.Context, c *Client, ref transport.Reference) error {
			_, _, err := c.Pull(ctx, ref, filepath.Join(t.TempDir(), "b.raw"), PullOptions{})
			return err
		},
		"push": func(ctx context.Context, c *Client, ref transport.Reference) error {
			_, err := c.Push(ctx, []string{file}, ref, PushOptions{Base: BaseNone})
			return err
		},
	}
	for _, at := range []struct {
		path   string
		status int
	}{
		{"/v2/", 200}, {"/v2/", 401}, {"/v2/", 503}, {"/token", 200}, {"/token", 403},
		{"/manifests/", 200}, {"/manifests/", 404}, {"/manifests/", 500}, {"/blobs/", 500},
		{"/blobs/", 206}, {"/uploads/", 202}, {"/uploads/", 400},
	} {
		for what, work := range works {
			for _, drip := range []bool{false, true} {
				if at.path == "/blobs/" && at.status == 206 && what == "push" {
					continue
				}
				name := strings.Join([]string{what, at.path, http.StatusText(at.status)}, " ")
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					l := newLying(t)
					l.NewImage(t, noise(41, 1<<20))
					l.Token = at.path == "/token"
					inner := l.Server.Config.Handler
					l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter,
						r *http.Request) {
						if at.path == r.URL.Path || at.path != "/v2/" &&
							strings.Contains(r.URL.Path, at.path) {
							if at.status == http.StatusPartialContent {
								w.Header().Set("Content-Range", strings.Replace(
									r.Header.Get("Range"), "=", " ", 1)+"/*")
							}
							hangs(w, r, at.status, drip)
							return
						}
						inner.ServeHTTP(w, r)
					})
					opt := l.options()
					opt.Timeout = time.Second
					opt.Idle = 300 * time.Millisecond
					c := newClient(t, opt)
					_ = work(t.Context(), c, l.ref(t, "vm/a:1"))
				})
			}
		}
	}
}

// TestUploadIsTaken: a registry that takes nothing of a piece is an error.
func TestUploadIsTaken(t *testing.T) {
	p := newPushTry(t)
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	p.m.fault = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPatch {
			return p.u.serve(w, r)
		}
		<-done // the context of a request whose body nobody reads does not end
		return true
	}
	c := newClient(t, transport.Options{Insecure: []string{p.m.host}, Timeout: 3 * time.Second,
		Idle: time.Second})
	_, err := c.Push(t.Context(), []string{p.file}, p.m.ref(t, "vm/a:1"),
		PushOptions{Base: BaseNone})
	require.ErrorContains(t, err, "nothing came")
}

// TestMirrorIsSlow: a mirror that sends a byte now and then, or nothing any more, is left for the
// registry, and stays behind it for a while.
func TestMirrorIsSlow(t *testing.T) {
	for what, drip := range map[string]bool{"drips": true, "silent": false} {
		t.Run(what, func(t *testing.T) {
			registry, mirror, opt := mirrored(t)
			content := noise(42, 1<<20)
			layer := tarOf(t, tarFile{Name: "disk/a.img", Content: content})
			for _, l := range []*lying{registry, mirror} {
				l.Tags["1"] = l.Image(t, layer)
			}
			slow := func(w http.ResponseWriter, r *http.Request, p []byte) bool {
				w.Header().Set("Content-Range", strings.Replace(r.Header.Get("Range"), "=", " ", 1)+
					"/*")
				w.WriteHeader(http.StatusPartialContent)
				for at := 0; r.Context().Err() == nil; time.Sleep(20 * time.Millisecond) {
					if drip || at == 0 {
						_, _ = w.Write(p[at : at+1])
						at++
					}
					_ = http.NewResponseController(w).Flush()
				}
				return true
			}
			for range 100 {
				mirror.Faults = append(mirror.Faults, slow)
			}
			var warned []string
			opt.Warn = func(text string) { warned = append(warned, text) }
			opt.Turn = 300 * time.Millisecond
			c := newClient(t, opt)
			src := testtool.Must(c.Source(registry.ref(t, "vm/a:1"), ""))(t)
			r := testtool.Must(transport.Resolve(t.Context(), src, registry.ref(t, "vm/a:1")))(t)
			b := testtool.Must(src.Blob(r.Manifest.Layers[0]))(t)
			got := make([]byte, len(layer))
			require.NoError(t, b.Fill(t.Context(), got, 0))
			require.Equal(t, layer, got)
			require.Contains(t, strings.Join(warned, "\n"), "is asked before it")
			asked := mirror.Requests("/blobs/")
			require.NoError(t, b.Fill(t.Context(), got, 0))
			require.Equal(t, asked, mirror.Requests("/blobs/"))
		})
	}
}

// TestByteInEachConnection: a registry that sends a byte in each connection, and then breaks it, is
// an error when its time is over. A mirror like that is left for the registry.
func TestByteInEachConnection(t *testing.T) {
	content := noise(43, 1<<20)
	registry, mirror, opt := mirrored(t)
	for _, l := range []*lying{registry, mirror} {
		l.NewImage(t, content)
	}
	for range 1000 {
		mirror.Faults = append(mirror.Faults, registrytest.Few(1, 0))
	}
	opt.Turn = time.Second // the registry itself has time
	out := filepath.Join(t.TempDir(), "a.raw")
	pull := func(opt transport.Options) error {
		_, _, err := newClient(t, opt).Pull(t.Context(), registry.ref(t, "vm/a:1"), out,
			PullOptions{Replace: true})
		return err
	}
	require.NoError(t, pull(opt))
	onlyFile(t, filepath.Dir(out), "a.raw", content)
	registry.Faults, opt.Mirrors, opt.Timeout = mirror.Faults, nil, time.Second
	require.ErrorContains(t, pull(opt), "nothing or too little came")
}

// TestSlowLinkIsEnough: a link that is slow and breaks often is no error, as long as enough comes.
func TestSlowLinkIsEnough(t *testing.T) {
	l := newLying(t)
	opt := l.options()
	opt.Timeout = 2 * time.Second
	// No connection brings enough within the timeout, two do; and there are so many of them
	// that all take longer than that.
	const perConnection, connections = 2*256 - 1, 45
	content := noise(44, perConnection*connections)
	desc := l.Add(content)
	for range connections {
		l.Faults = append(l.Faults, registrytest.Few(perConnection, 50*time.Millisecond))
	}
	src := testtool.Must(newClient(t, opt).Source(l.ref(t, "vm/a:1"), ""))(t)
	b := testtool.Must(src.Blob(desc))(t)
	began := time.Now()
	got := make([]byte, len(content))
	require.NoError(t, b.Fill(t.Context(), got, 0))
	require.Equal(t, content, got)
	require.Greater(t, time.Since(began), 2*opt.Timeout)
}
