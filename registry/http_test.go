package registry

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pullHTTP fetches vm/a:1 into a new directory.
func pullHTTP(t testing.TB, l *lying, opt Options) (dir string, err error) {
	t.Helper()
	dir = t.TempDir()
	_, _, err = newClient(
		t,
		opt,
	).Pull(context.Background(), l.ref(t, "vm/a:1"), filepath.Join(dir, "out.raw"), PullOptions{})
	return dir, err
}

// newImage makes the registry have vm/a:1.
func (l *lying) newImage(t testing.TB, content []byte) {
	l.tags["1"] = l.image(t, tarOf(t, tarFile{name: "disk/a.img", content: content}))
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
			l.newImage(t, content)
			l.faults, l.noRanges, l.token = c.faults, c.noRanges, c.token
			if c.elsewhere {
				l.elsewhere = l.storage.URL
			}
			dir, err := pullHTTP(t, l, l.options())
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", content)
			manifests := 1
			if c.token { // the first tells which token is wanted
				manifests = 2
			}
			require.Equal(t, manifests, l.requests("/manifests/"), "registries count them")
			require.Empty(t, l.faults)
			for _, a := range l.auth {
				require.Empty(t, a, "where a registry redirects to gets no credential of it")
			}
		})
	}
}

// TestFetchWaitsForItsReader: time in which nobody reads does not count as time in which nothing
// comes. Layers of container images are opened before they are read.
func TestFetchWaitsForItsReader(t *testing.T) {
	l := newLying(t)
	content := noise(23, 1<<20)
	desc := l.add(content)
	l.faults = []fault{few(1000, 100*time.Millisecond)}
	src, err := newClient(t, l.options()).source(l.ref(t, "vm/a:1"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, src.Close()) })
	b, err := src.blob(desc)
	require.NoError(t, err)
	in := b.stream(t.Context(), 0, desc.Size)
	defer in.Close()
	got := make([]byte, len(content))
	_, err = io.ReadFull(in, got[:1000])
	require.NoError(t, err)
	f := in.(*fetch)
	if body, ok := f.body.(*looseBody); ok { // otherwise the cut was noticed already
		x := body.ReadCloser.(*exchange)
		require.False(t, x.timer.Stop(), "the timer runs although nobody reads")
	}
	for _, at := range []*time.Time{&f.read, &f.last, &f.tries.last} {
		*at = at.Add(-time.Hour)
	}
	_, err = io.ReadFull(in, got[1000:])
	require.NoError(t, err)
	require.Equal(t, content, got)
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
			"it says that the next try is for in 1h0m0s, and no try waits for longer than 500ms"},
		"retry never": {always(says(503, "Retry-After", "999999999999")), "the next try is for in"},
		"416":         {always(says(416)), "416"},
		"another range": {always(func(w http.ResponseWriter, _ *http.Request, content []byte) bool {
			w.Header().Set("Content-Range",
				fmt.Sprintf("bytes 5-%d/%d", len(content)-1, len(content)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(content[5:])
			return true
		}), "the range"},
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
			l.newImage(t, noise(21, 1<<20))
			l.faults = c.faults
			opt := l.options()
			opt.Patience = 500 * time.Millisecond
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
	l.newImage(t, noise(22, 1<<20))
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := errors.New("stopped")
	l.faults = []fault{func(w http.ResponseWriter, r *http.Request, content []byte) bool {
		cancel(stop)
		<-r.Context().Done()
		return true
	}}
	dir := t.TempDir()
	_, _, err := newClient(
		t,
		l.options(),
	).Pull(ctx, l.ref(t, "vm/a:1"), filepath.Join(dir, "out.raw"), PullOptions{})
	require.ErrorIs(t, err, stop)
	emptyDir(t, dir)
}

// TestReadAt reads ranges of a blob, each by requests of its own.
func TestReadAt(t *testing.T) {
	for _, noRanges := range []bool{false, true} {
		l := newLying(t)
		l.noRanges = noRanges
		content := noise(23, 300<<10)
		desc := l.add(content)
		endpoints, err := newClient(
			t,
			l.options(),
		).endpoints(l.ref(t, "vm/a:1").remote.Context(), true)
		require.NoError(t, err)
		b := remoteBlob(desc, &repository{endpoints: endpoints})
		l.faults = []fault{cut(10), says(500), cut(0)}
		for _, c := range []struct{ off, length int }{{0, 1}, {1000, 100 << 10},
			{len(content) - 1, 1}, {len(content) - 5, 5}} {
			p := make([]byte, c.length)
			n, err := b.ReadAt(context.Background(), p, int64(c.off))
			require.NoError(t, err)
			require.Equal(t, c.length, n)
			require.Equal(t, content[c.off:c.off+c.length], p)
		}
	}
}

// TestMirror: a mirror is asked first, and the registry where the mirror does not have it.
func TestMirror(t *testing.T) {
	content := noise(24, 1<<20)
	registry, mirror := newLying(t), newLying(t)
	registry.newImage(t, content)
	opt := Options{
		Insecure: []string{registry.host(), mirror.host()},
		Mirrors:  []string{registry.host() + "=" + mirror.host() + "/cache"},
	}

	dir, err := pullHTTP(t, registry, opt)
	require.NoError(t, err)
	onlyFile(t, dir, "out.raw", content)
	require.Equal(t, 1, mirror.requests("GET /v2/cache/vm/a/manifests/1"))

	mirror.newImage(t, content)
	before := registry.requests("/v2/vm")
	dir, err = pullHTTP(t, registry, opt)
	require.NoError(t, err)
	onlyFile(t, dir, "out.raw", content)
	require.Equal(t, before, registry.requests("/v2/vm"))

	// A blob that the mirror has lost comes from the registry.
	for digest, blob := range mirror.store {
		if len(blob) > 1000 {
			delete(mirror.store, digest)
		}
	}
	dir, err = pullHTTP(t, registry, opt)
	require.NoError(t, err)
	onlyFile(t, dir, "out.raw", content)
}

// TestInsecure: without the user's permission a registry is never used without TLS, not even on
// this machine.
func TestInsecure(t *testing.T) {
	l := newLying(t)
	l.newImage(t, noise(25, 8192))
	dir, err := pullHTTP(t, l, Options{})
	require.ErrorContains(t, err, "--insecure-registry")
	emptyDir(t, dir)
	require.Zero(t, l.requests(""), "nothing has come to it")
}

// TestCredentials checks where credentials come from, and that nothing shows them.
func TestCredentials(t *testing.T) {
	const secret = "pa55word"
	for _, token := range []bool{false, true} {
		l := newLying(t)
		content := noise(26, 100<<10)
		l.newImage(t, content)
		l.basic, l.token = "me:"+secret, token
		auth := base64.StdEncoding.EncodeToString([]byte(l.basic))
		host, _, _ := strings.Cut(l.host(), ":")
		write := func(name, text string) string {
			file := filepath.Join(t.TempDir(), name)
			require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
			return file
		}
		good := map[string]string{
			"registry": write(
				"config.json",
				fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, l.host(), auth),
			),
			"repository": write(
				"x",
				fmt.Sprintf(
					`{"auths":{%q:{"auth":"eDp5"},"%s/vm/a":{"auth":%q}}}`,
					l.host(),
					l.host(),
					auth,
				),
			),
			"path": write(
				"x",
				fmt.Sprintf(
					`{"auths":{"%s/vm":{"username":"me","password":%q}}}`,
					l.host(),
					secret,
				),
			),
			"glob": write(
				"x",
				fmt.Sprintf(
					`{"auths":{%q:{"auth":%q}}}`,
					strings.Replace(l.host(), "127.0", "*.*", 1),
					auth,
				),
			),
			"secret": filepath.Dir(
				write(
					".dockerconfigjson",
					fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, l.host(), auth),
				),
			),
			"old": write(
				".dockercfg",
				fmt.Sprintf(`{"https://%s/v1/":{"auth":%q}}`, l.host(), auth),
			),
		}
		for name, file := range good {
			opt := l.options()
			opt.Config = file
			dir, err := pullHTTP(t, l, opt)
			require.NoError(t, err, name)
			onlyFile(t, dir, "out.raw", content)
		}
		opt := l.options()
		opt.Own, opt.OwnHost = Credential{"me", secret}, l.host()
		_, err := pullHTTP(t, l, opt)
		require.NoError(t, err)
		require.NotContains(t, fmt.Sprintf("%v %+v %#v", opt, opt, opt), secret)

		// Credentials of another registry, or of another repository of this one, are not sent.
		for name, text := range map[string]string{
			"other path": fmt.Sprintf(`{"auths":{"%s/other":{"auth":%q}}}`, l.host(), auth),
			"other host": fmt.Sprintf(`{"auths":{"%s:1":{"auth":%q}}}`, host, auth),
			"wrong": fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"%s2"}}}`, l.host(),
				secret),
		} {
			opt := l.options()
			opt.Config, opt.Patience = write("x", text), 100*time.Millisecond
			_, err := pullHTTP(t, l, opt)
			require.Error(t, err, name)
			require.NotContains(t, err.Error(), secret)
			require.NotContains(t, err.Error(), auth)
		}
		_, err = New(Options{Config: write("x", `{"auths": {"x": {"auth": "`+auth+`", }}}`)})
		require.Error(t, err)
		require.NotContains(t, err.Error(), auth)
	}
}
