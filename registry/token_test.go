package registry

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/keychain"
	"kubevirt.io/disk/registry/transport"
)

// TestTokenServerNearby: a token server at a private address is asked if the registry was named
// insecure, also by a redirect.
func TestTokenServerNearby(t *testing.T) {
	content := noise(60, 100<<10)
	for name, path := range map[string]string{"": "/token?tenant=a", "redirect": "/moved"} {
		t.Run(name, func(t *testing.T) {
			l := newLying(t)
			l.NewImage(t, content)
			l.WantsTokens(t, func(tokens string) string { return tokens + path },
				func(w http.ResponseWriter, r *http.Request) {
					user, password, _ := r.BasicAuth()
					switch q := r.URL.Query(); {
					case r.URL.Path == "/moved":
						http.Redirect(w, r, "/token?tenant=a&"+r.URL.RawQuery, http.StatusFound)
					case user+password != "mepa55word" || q.Get("tenant") != "a" ||
						q.Get("service") != `a "b"` ||
						q.Get("scope") != "repository:vm/a:pull":
						w.WriteHeader(http.StatusForbidden)
					default:
						_, _ = w.Write([]byte(`{"access_token":"good"}`))
					}
				})
			opt := l.options()
			opt.Own = keychain.Credential{Username: "me", Password: "pa55word"}
			opt.OwnHost, opt.Timeout = l.Host(), time.Second
			brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
		})
	}
}

// TestTokenServerRefused: where no token can come from is said at once, and nothing is sent there.
func TestTokenServerRefused(t *testing.T) {
	asked := 0
	tokens := func(w http.ResponseWriter, _ *http.Request) {
		asked++
		_, _ = w.Write([]byte(`{"token":"","refresh_token":"pa55word"}`))
	}
	for name, c := range map[string]struct {
		realm func(tokens string) string
		want  string
	}{
		"private": {func(at string) string { return strings.Replace(at, "http:", "https:", 1) },
			"a private address: if that is intended, name 127.0.0.1:"},
		"odd":     {func(string) string { return "https://127.1:1/" }, "a private address"},
		"number":  {func(string) string { return "https://0x7f000001/" }, "a private address"},
		"IPv6":    {func(string) string { return "https://[fe80::1%25x]:7/" }, "a private address"},
		"plain":   {func(at string) string { return at }, "without TLS: if that is intended"},
		"file":    {func(string) string { return "file://etc/passwd" }, "no address of a token"},
		"nothing": {func(string) string { return "" }, "does not say from which address"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLying(t)
			opt := transport.Options{CA: l.TLS(t), Timeout: time.Hour}
			l.NewImage(t, noise(61, 8192))
			l.WantsTokens(t, c.realm, tokens)
			require.ErrorContains(t, testtool.Err(pullHTTP(t, l, opt)), c.want)
			require.Zero(t, asked)
		})
	}
	l := newLying(t)
	l.NewImage(t, noise(61, 8192))
	l.WantsTokens(t, func(at string) string { return at }, tokens)
	_, err := pullHTTP(t, l, l.options())
	require.ErrorContains(t, err, "answers without a token")
	require.NotContains(t, err.Error(), "pa55word")
	require.NotContains(t, err.Error(), "token-server.invalid")
	require.NotZero(t, asked)
}

// TestExpiredTokenIsForbidden: a token that has expired is renewed also where that is a 403, and
// once only, because 403 may be meant.
func TestExpiredTokenIsForbidden(t *testing.T) {
	content := noise(62, 1<<20)
	for name, good := range map[string]int{"expired": 3, "forbidden": 0} {
		t.Run(name, func(t *testing.T) {
			l := newLying(t)
			l.NewImage(t, content)
			for range 6 {
				l.Faults = append(l.Faults, cut(10000))
			}
			issued, left := 0, 0
			l.WantsTokens(t, func(at string) string { return at },
				func(w http.ResponseWriter, _ *http.Request) {
					issued++
					left = good
					_, _ = w.Write([]byte(`{"token":"good"}`))
				})
			inner := l.Server.Config.Handler
			l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				if r.Header.Get("Authorization") != "" {
					if left--; left < 0 {
						w.WriteHeader(http.StatusForbidden)
						return
					}
				}
				inner.ServeHTTP(w, r)
			})
			dir, err := pullHTTP(t, l, l.options())
			if good == 0 {
				require.ErrorContains(t, err, "403")
				require.Equal(t, 2, issued)
				return
			}
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", content)
			require.Greater(t, issued, 2)
		})
	}
}

// TestUnknownCertificate: a registry with TLS and a certificate of nobody is used if it was named
// insecure, also for a push, and the log says so once.
func TestUnknownCertificate(t *testing.T) {
	content := noise(63, 100<<10)
	l := newLying(t)
	l.TLS(t)
	l.NewImage(t, content)
	l.Basic = "me:pa55word"
	opt := l.options()
	opt.Own = keychain.Credential{Username: "me", Password: "pa55word"}
	opt.OwnHost, opt.Timeout = l.Host(), time.Second
	var warned []string
	opt.Warn = func(text string) { warned = append(warned, text) }
	brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
	require.Len(t, warned, 1)
	require.Contains(t, warned[0], "because of --insecure-registry")

	opt.Insecure = nil
	require.ErrorContains(t, testtool.Err(pullHTTP(t, l, opt)), "--registry-ca")
}

// TestTokenServerMoves: a credential goes to the address that the registry has named. When that
// redirects, nobody else is asked, whatever kind of credential it is; who has none may be sent
// anywhere.
func TestTokenServerMoves(t *testing.T) {
	content := noise(64, 100<<10)
	for name, c := range map[string]struct {
		entry  string // of the file with credentials; "": there is none
		status int
		want   bool // an image
	}{
		"a password":       {`"auth":"bWU6cGE1NXdvcmQ="`, http.StatusFound, false},
		"a password, kept": {`"auth":"bWU6cGE1NXdvcmQ="`, http.StatusTemporaryRedirect, false},
		"a refresh token":  {`"identitytoken":"pa55word"`, http.StatusTemporaryRedirect, false},
		"a refresh token, for ever": {`"identitytoken":"pa55word"`, http.StatusPermanentRedirect,
			false},
		"a refresh token, changed": {`"identitytoken":"pa55word"`, http.StatusSeeOther, false},
		"nobody":                   {"", http.StatusTemporaryRedirect, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLying(t)
			l.NewImage(t, content)
			asked := 0
			elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				asked++
				require.Empty(t, r.Header.Get("Authorization"))
				require.Empty(t, r.Referer())
				_, _ = w.Write([]byte(`{"access_token":"good"}`))
			}))
			defer elsewhere.Close()
			l.WantsTokens(t, func(tokens string) string { return tokens + "/token" },
				func(w http.ResponseWriter, r *http.Request) {
					if strings.HasSuffix(r.URL.Path, "/token") { // that is allowed
						http.Redirect(w, r, "/moved?"+r.URL.RawQuery, c.status)
						return
					}
					http.Redirect(w, r, elsewhere.URL+"?"+r.URL.RawQuery, c.status)
				})
			opt := l.options()
			opt.Timeout = time.Second
			if c.entry != "" {
				opt.Config = filepath.Join(t.TempDir(), "config.json")
				require.NoError(t, os.WriteFile(opt.Config, fmt.Appendf(nil,
					`{"auths":{%q:{%s}}}`, l.Host(), c.entry), 0o600))
			}
			dir, err := pullHTTP(t, l, opt)
			if c.want {
				require.NoError(t, err)
				onlyFile(t, dir, "out.raw", content)
				require.NotZero(t, asked)
				return
			}
			require.ErrorContains(t, err, "the credential must not go there")
			require.NotContains(t, err.Error(), "pa55word")
			require.Zero(t, asked)
		})
	}
}

// TestScopesWithoutEnd: a registry that names another scope at each request gets no more of our
// memory for that, and we get our image.
func TestScopesWithoutEnd(t *testing.T) {
	content := noise(65, 1<<20)
	l := newLying(t)
	l.NewImage(t, content)
	longest := 0
	l.WantsTokens(t, func(tokens string) string { return tokens },
		func(w http.ResponseWriter, r *http.Request) {
			longest = max(longest, len(r.URL.RawQuery))
			_, _ = w.Write([]byte(`{"token":"good"}`))
		})
	inner, n := l.Server.Config.Handler, 0
	l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			if n++; n%2 == 1 {
				w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="x",scope="%d%s"`, n,
					strings.Repeat("x", 20<<10)))
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
		}
		inner.ServeHTTP(w, r)
	})
	img := testtool.Must(newClient(t, l.options()).Resolve(t.Context(), l.ref(t, "vm/a:1")))(t)
	defer img.Source.Close()
	b := testtool.Must(img.Source.Blob(img.Manifest.Layers[0]))(t)
	for range 20 {
		require.NoError(t, b.Fill(t.Context(), make([]byte, 4096), 0))
	}
	require.Greater(t, longest, 20<<10)
	require.LessOrEqual(t, longest, 64<<10)
}
