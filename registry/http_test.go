package registry

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/keychain"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// pullHTTP fetches vm/a:1 into a new directory.
func pullHTTP(t testing.TB, l *lying, opt transport.Options) (dir string, err error) {
	t.Helper()
	dir = t.TempDir()
	_, _, err = newClient(t, opt).Pull(context.Background(), l.ref(t, "vm/a:1"),
		filepath.Join(dir, "out.raw"), PullOptions{})
	return dir, err
}

// TestFetchGoesOn: whatever happens on the way, the disk arrives, and nothing is fetched twice.
func TestFetchGoesOn(t *testing.T) {
	content := noise(20, 1<<20)
	expired := says(http.StatusForbidden)
	for name, c := range map[string]struct {
		faults    []fault
		elsewhere bool
		noRanges  bool
		token     bool
	}{
		"nothing":        {},
		"cut":            {faults: []fault{cut(100 << 10), cut(0), cut(1), cut(500 << 10)}},
		"cut, no ranges": {faults: []fault{cut(100 << 10), cut(200 << 10)}, noRanges: true},
		"429": {faults: []fault{says(429, "Retry-After", "0"), says(429),
			says(503), cut(9), says(500)}},
		"redirect":      {elsewhere: true},
		"redirect, cut": {elsewhere: true, faults: []fault{cut(100 << 10), cut(1)}},
		"redirect expired": {elsewhere: true,
			faults: []fault{expired, cut(1000), expired, says(400), says(401)}},
		"no ranges": {noRanges: true},
		"tokens": {token: true,
			faults: []fault{cut(1000), cut(1000), cut(1000), cut(1000), cut(1000), cut(1000),
				cut(1000)}},
		"tokens and redirects": {token: true, elsewhere: true,
			faults: []fault{cut(1000), expired, cut(1000), cut(1000), cut(1000)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLying(t)
			l.NewImage(t, content)
			l.Faults, l.NoRanges, l.Token = c.faults, c.noRanges, c.token
			if c.elsewhere {
				l.Elsewhere = l.Storage.URL
			}
			brings(t, newClient(t, l.options()), l.ref(t, "vm/a:1"), PullOptions{}, content)
			require.Equal(t, 1, l.Requests("/manifests/"), "registries count them")
			require.Empty(t, l.Faults)
			for _, a := range l.Auth {
				require.Empty(t, a, "where a registry redirects to gets no credential of it")
			}
		})
	}
}

// TestFetchEnds: a lasting problem is soon an error, and leaves nothing.
func TestFetchEnds(t *testing.T) {
	always := func(f fault) []fault {
		all := make([]fault, 50)
		for i := range all {
			all[i] = f
		}
		return all
	}
	for name, c := range map[string]struct {
		faults []fault
		want   string
	}{
		"404": {always(says(404)), "404"},
		"403": {always(says(403)), "403"},
		"401": {always(says(401)), "--registry-config"},
		"500": {always(says(500)), "given up"},
		"retry later": {always(says(429, "Retry-After", "3600")),
			"it says that the next try is for in 1h0m0s, and no try waits for longer than 2s"},
		"retry never": {always(says(503, "Retry-After", "999999999999")), "the next try is for in"},
		"416":         {always(says(416)), "416"},
		"another range": {always(func(w http.ResponseWriter, _ *http.Request, content []byte) bool {
			w.Header().Set("Content-Range",
				fmt.Sprintf("bytes 5-%d/%d", len(content)-1, len(content)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(content[5:])
			return true
		}), "206 Partial Content"},
		"another size": {always(func(w http.ResponseWriter, _ *http.Request, content []byte) bool {
			w.Header().Set("Content-Range",
				fmt.Sprintf("bytes 0-%d/%d", len(content), len(content)+1))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(append(content, 0))
			return true
		}), "the manifest says"},
		"wrong bytes": {always(func(w http.ResponseWriter, _ *http.Request, content []byte) bool {
			wrong := append([]byte{}, content...)
			wrong[len(wrong)-700] ^= 1
			_, _ = w.Write(wrong)
			return true
		}), "was changed on its way"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLying(t)
			l.NewImage(t, noise(21, 1<<20))
			l.Faults = c.faults
			opt := l.options()
			opt.Timeout = 2 * time.Second // a busy machine may be silent for long
			dir, err := pullHTTP(t, l, opt)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "signature")
			emptyDir(t, dir)
		})
	}
}

// TestFetchCancelled: an interrupted fetch ends although the registry never answers.
func TestFetchCancelled(t *testing.T) {
	l := newLying(t)
	l.NewImage(t, noise(22, 1<<20))
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := errors.New("stopped")
	l.Faults = []fault{func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		cancel(stop)
		<-r.Context().Done()
		return true
	}}
	dir := t.TempDir()
	require.ErrorIs(t,
		testtool.Err2(newClient(t, l.options()).Pull(ctx, l.ref(t, "vm/a:1"),
			filepath.Join(dir, "out.raw"), PullOptions{})), stop)
	emptyDir(t, dir)
}

// TestReadAt reads ranges of a blob, each by requests of its own.
func TestReadAt(t *testing.T) {
	for _, noRanges := range []bool{false, true} {
		l := newLying(t)
		l.NoRanges = noRanges
		content := noise(23, 300<<10)
		desc := l.Add(content)
		src := testtool.Must(newClient(t, l.options()).Source(l.ref(t, "vm/a:1"), ""))(t)
		b := testtool.Must(src.Blob(desc))(t)
		l.Faults = []fault{cut(10), says(500), cut(0)}
		for _, c := range []struct{ off, length int }{{0, 1}, {1000, 100 << 10},
			{len(content) - 1, 1}, {len(content) - 5, 5}} {
			p := make([]byte, c.length)
			n := testtool.Must(b.ReadAt(context.Background(), p, int64(c.off)))(t)
			require.Equal(t, c.length, n)
			require.Equal(t, content[c.off:c.off+c.length], p)
		}
	}
}

// TestMirror: a mirror is asked first, and the registry where the mirror does not have it.
func TestMirror(t *testing.T) {
	content := noise(24, 1<<20)
	registry, mirror := newLying(t), newLying(t)
	registry.NewImage(t, content)
	opt := transport.Options{
		Insecure: []string{registry.Host(), mirror.Host()},
		Mirrors:  []string{registry.Host() + "=" + mirror.Host() + "/cache"},
	}

	brings(t, newClient(t, opt), registry.ref(t, "vm/a:1"), PullOptions{}, content)
	require.Equal(t, 1, mirror.Requests("GET /v2/cache/vm/a/manifests/1"))

	mirror.NewImage(t, content)
	before := registry.Requests("/v2/vm")
	brings(t, newClient(t, opt), registry.ref(t, "vm/a:1"), PullOptions{}, content)
	require.Equal(t, before, registry.Requests("/v2/vm"))

	// A blob that the mirror has lost comes from the registry.
	for digest, blob := range mirror.Store {
		if len(blob) > 1000 {
			delete(mirror.Store, digest)
		}
	}
	brings(t, newClient(t, opt), registry.ref(t, "vm/a:1"), PullOptions{}, content)
}

// TestSignedAddressIsNotToldOn: whom a signed address redirects to is not told that address.
func TestSignedAddressIsNotToldOn(t *testing.T) {
	l := newLying(t)
	content := noise(68, 1<<20)
	l.NewImage(t, content)
	moves := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "signature=secret", r.URL.RawQuery)
		http.Redirect(w, r, l.Storage.URL+r.URL.Path, http.StatusFound)
	}))
	defer moves.Close()
	inner := l.Storage.Config.Handler
	l.Storage.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Empty(t, r.Referer())
		inner.ServeHTTP(w, r)
	})
	l.Elsewhere = moves.URL
	brings(t, newClient(t, l.options()), l.ref(t, "vm/a:1"), PullOptions{}, content)
}

// TestPlainStorage: where a registry leads to storage without TLS, the message names what has to be
// allowed, and that helps.
func TestPlainStorage(t *testing.T) {
	content := noise(69, 1<<20)
	l := newLying(t)
	opt := transport.Options{CA: l.TLS(t)}
	l.NewImage(t, content)
	l.Elsewhere = "http://192.0.2.1:1"
	require.ErrorContains(t, testtool.Err(pullHTTP(t, l, opt)), "name "+l.Host()+" with --insecure")
	l.Elsewhere = l.Storage.URL
	opt.Insecure = []string{l.Host()}
	brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
}

// TestRedirectLoop: redirects that lead in a circle end a pull at once.
func TestRedirectLoop(t *testing.T) {
	l := newLying(t)
	l.NewImage(t, noise(28, 8192))
	l.Elsewhere = l.Server.URL + "/v2/vm/a/blobs"
	require.ErrorContains(t, testtool.Err(pullHTTP(t, l, l.options())), "after 10 redirects")
	require.Equal(t, 10, l.Requests("/blobs/"))
}

// TestInsecure: without the user's permission a registry is never used without TLS, unless it is on
// this machine.
func TestInsecure(t *testing.T) {
	l := newLying(t)
	content := noise(25, 8192)
	l.NewImage(t, content)
	brings(t, newClient(t, transport.Options{}), l.ref(t, "vm/a:1"), PullOptions{}, content)

	// Whom it names may be elsewhere. This is no address of this machine, but leads there.
	before := l.Requests("")
	elsewhere := strings.Replace(l.Host(), "127.0.0.1", "0.0.0.0", 1)
	c := newClient(t, transport.Options{})
	require.ErrorContains(t, testtool.Err2(c.Pull(t.Context(), parsed(t, elsewhere+"/vm/a:1"),
		filepath.Join(t.TempDir(), "out.raw"), PullOptions{})), "--insecure-registry")
	require.Equal(t, before, l.Requests(""), "nothing has come to it")
	l.Faults = []fault{registrytest.Redirects("http://" + elsewhere + "/x")}
	_, err := pullHTTP(t, l, transport.Options{Timeout: time.Second})
	require.ErrorContains(t, err, "--insecure-registry")
}

// TestFirstAnswerIsLost: a registry without TLS whose first answer does not come is asked again. If
// that answer asks for a long pause, nobody asks before it is over.
func TestFirstAnswerIsLost(t *testing.T) {
	l := newLying(t)
	content := noise(27, 8192)
	l.NewImage(t, content)
	inner := l.Server.Config.Handler
	lost, busy := false, false
	l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !lost {
			lost = true
			if busy {
				w.Header().Set("Retry-After", "3600")
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			panic(http.ErrAbortHandler)
		}
		inner.ServeHTTP(w, r)
	})
	for _, opt := range []transport.Options{{}, l.options()} {
		lost, busy = false, true
		require.ErrorContains(t, testtool.Err(pullHTTP(t, l, opt)), "the next try is for in 1h0m0s")
		lost, busy = false, false
		brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
	}
}

// TestCredentials: a credential from a file, or one that was named, opens the registry, and nothing
// shows it. Which file and key count is TestCredentialKeys'.
func TestCredentials(t *testing.T) {
	const secret = "pa55word"
	for _, token := range []bool{false, true} {
		l := newLying(t)
		content := noise(26, 100<<10)
		l.NewImage(t, content)
		l.Basic, l.Token = "me:"+secret, token
		auth := base64.StdEncoding.EncodeToString([]byte(l.Basic))
		host, _, _ := strings.Cut(l.Host(), ":")
		config := filepath.Join(t.TempDir(), "config.json")
		write := func(text string) {
			require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
		}
		opt := l.options()
		opt.Config = config
		write(fmt.Sprintf(`{"auths":{%q:{"auth":"eDp5"},"%s/vm":{"auth":%q}}}`, l.Host(), l.Host(),
			auth))
		brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
		own := l.options()
		own.Own, own.OwnHost = keychain.Credential{Username: "me", Password: secret}, l.Host()
		require.NoError(t, testtool.Err(pullHTTP(t, l, own)))
		require.NotContains(t, fmt.Sprintf("%v %+v %#v", own, own, own), secret)

		// Credentials of another registry, or of another repository of this one, are not sent.
		opt.Timeout = 100 * time.Millisecond
		for name, text := range map[string]string{
			"other path": fmt.Sprintf(`{"auths":{"%s/other":{"auth":%q}}}`, l.Host(), auth),
			"other host": fmt.Sprintf(`{"auths":{"%s:1":{"auth":%q}}}`, host, auth),
			"wrong": fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"%s2"}}}`, l.Host(),
				secret),
		} {
			write(text)
			_, err := pullHTTP(t, l, opt)
			require.Error(t, err, name)
			require.NotContains(t, err.Error(), secret)
			require.NotContains(t, err.Error(), auth)
		}
		write(`{"auths": {"x": {"auth": "` + auth + `", }}}`)
		_, err := New(opt)
		require.Error(t, err)
		require.NotContains(t, err.Error(), auth)
	}
}

// TestMissingHelper: a public image needs no helper for credentials.
func TestMissingHelper(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("DOCKER_CONFIG", "")
	require.NoError(t, os.MkdirAll(filepath.Join(home, ".docker"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(home, ".docker", "config.json"),
		[]byte(`{"credsStore":"none"}`), 0o600))
	l := newLying(t)
	content := noise(31, 64<<10)
	l.NewImage(t, content)
	file := filepath.Join(home, ".docker", "config.json")
	for _, config := range []string{file, ""} {
		opt := l.options()
		opt.Config = config
		dir := testtool.Must(pullHTTP(t, l, opt))(t, "the image is public")
		onlyFile(t, dir, "out.raw", content)
	}
}

// TestNobodyAnswers: a registry that refuses connections from the beginning is an error long before
// the timeout of an hour, and the first warning says so at once.
func TestNobodyAnswers(t *testing.T) {
	ref := parsed(t, fmt.Sprintf("127.0.0.1:%d/vm/a:1", testtool.Must(peers.FreePort())(t)))
	file := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(file, make([]byte, 4096), 0o600))
	for what, work := range map[string]func(context.Context, *Client) error{
		"pull": func(ctx context.Context, c *Client) error {
			_, _, err := c.Pull(ctx, ref, filepath.Join(t.TempDir(), "a.raw"), PullOptions{})
			return err
		},
		"push": func(ctx context.Context, c *Client) error {
			_, err := c.Push(ctx, []string{file}, ref, PushOptions{Base: BaseNone})
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var told warnings
			err := work(t.Context(), newClient(t, transport.Options{Timeout: time.Hour,
				FirstTimeout: 2 * time.Second, Warn: told.add}))
			require.ErrorContains(t, err, "without any answer")
			require.ErrorContains(t, err, ref.Host())
			require.ErrorContains(t, err, "connection refused; check the name and the port")
			require.Contains(t, told.all()[0], "connection refused; next try in ")
		})
	}
}

// TestNeverAnswered: if a registry is silent, the error says so, and is not that of a context.
func TestNeverAnswered(t *testing.T) {
	for _, part := range []string{"/v2/", "/manifests/"} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			l, ended := newLying(t), make(chan struct{})
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				if strings.HasSuffix(r.URL.Path, "/v2/") == (part == "/v2/") {
					<-ended
				}
				l.Handle(w, r)
			}))
			defer server.Close()
			defer close(ended)
			host := server.Listener.Addr().String()
			c := newClient(t, transport.Options{Idle: time.Second, Timeout: time.Second,
				Insecure: []string{host}})
			err := testtool.Err2(c.Pull(t.Context(), parsed(t, host+"/vm/a:1"), t.TempDir(),
				PullOptions{}))
			require.ErrorContains(t, err, "nothing came")
			require.NotContains(t, err.Error(), "context deadline exceeded")
		})
	}
}

// TestRegistryRestarts: a registry that has answered once may be away for longer than one that
// never did.
func TestRegistryRestarts(t *testing.T) {
	l := newLying(t)
	content := noise(27, 1<<20)
	l.NewImage(t, content)
	opt := l.options()
	opt.FirstTimeout = 10 * time.Millisecond
	const away = 500 * time.Millisecond
	l.Faults = []fault{func(_ http.ResponseWriter, r *http.Request, _ []byte) bool {
		_ = l.Server.Listener.Close()
		time.AfterFunc(away, func() {
			again, err := net.Listen("tcp", l.Host())
			if err != nil {
				t.Error(err)
				return
			}
			go func() { _ = l.Server.Config.Serve(again) }()
		})
		panic(http.ErrAbortHandler)
	}}
	var told warnings
	opt.Warn = told.add
	brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
	require.Contains(t, fmt.Sprint(told.all()), "connection refused")
}
