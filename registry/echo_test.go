package registry

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
)

// TestSecretsThatComeBack: a server may say again what it was told in secret, or what it tells a
// client to use. It gets into no error, and into no line of the log, however it comes back.
func TestSecretsThatComeBack(t *testing.T) {
	content := noise(92, 100<<10)
	const query = "a=hush%2Fhush&X-Signature=tell%20nobody&plainsecret"
	raw := func(text string) fault { // what net/http does not understand
		return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			conn, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				_, _ = fmt.Fprintf(conn, text, r.URL.RawQuery)
				_ = conn.Close()
			}
			return true
		}
	}
	message := func(text func(r *http.Request) string) fault {
		return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			w.WriteHeader(http.StatusForbidden)
			_, _ = fmt.Fprintf(w, `{"errors":[{"code":"DENIED","message":%q}]}`, text(r))
			return true
		}
	}
	sent := func(r *http.Request) string { return r.URL.RawQuery }
	for name, c := range map[string]struct {
		answer fault
		want   string
	}{
		"message": {message(sent), "DENIED"},
		"decoded": {message(func(r *http.Request) string {
			return r.FormValue("a") + " and " + r.FormValue("X-Signature") + " plainsecret"
		}), "DENIED"},
		"at the end of what is shown": {message(func(r *http.Request) string {
			return strings.Repeat("x", 180) + r.FormValue("a") + r.FormValue("X-Signature")
		}), "DENIED"},
		"encoding": {func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			w.Header().Set("Content-Encoding", "br, "+r.URL.RawQuery)
			return false
		}, "Content-Encoding"},
		"range": {func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
			w.Header().Set("Content-Range", "bytes "+r.URL.RawQuery)
			w.WriteHeader(http.StatusPartialContent)
			return true
		}, ""},
		"status":   {raw("%s\r\n\r\n"), ""},
		"header":   {raw("HTTP/1.1 200 OK\r\n%s\r\n\r\n"), ""},
		"length":   {raw("HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n"), ""},
		"transfer": {raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: %s\r\n\r\n"), ""},
		"redirect": {registrytest.Redirects("https://a b/?" + query), "cannot be read"},
		"redirect, odd": {raw("HTTP/1.1 302 Found\r\nLocation: https://h:x/?%s\r\n\r\n"),
			"cannot be read"},
		"scheme": {registrytest.Redirects("plainsecret:x"), "redirects to an address"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, content)
			for range 50 {
				w.Faults = append(w.Faults, c.answer)
			}
			_, _, err := w.pull(t, w.Server.URL+webFile+"?"+query)
			require.Error(t, err)
			require.ErrorContains(t, err, c.want)
			for _, text := range append(w.told.all(), err.Error()) {
				for _, secret := range []string{"hush", "nobody", "plainsecret"} {
					require.NotContains(t, text, secret)
				}
			}
		})
	}

	// A registry that repeats the credential. Its other words are shown.
	l := newLying(t)
	l.NewImage(t, content)
	l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, password, ok := r.BasicAuth()
		if !ok {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		}
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = fmt.Fprintf(w, `{"errors":[{"code":"DENIED","message":"not with %s nor %s here"}]}`,
			password, strings.TrimPrefix(r.Header.Get("Authorization"), "Basic "))
	})
	opt := l.options()
	opt.Config = filepath.Join(t.TempDir(), "config.json")
	require.NoError(t, os.WriteFile(opt.Config, fmt.Appendf(nil,
		`{"auths":{%q:{"auth":"bWU6cGE1NXdvcmQ="}}}`, l.Host()), 0o600))
	var told []string
	opt.Warn = func(text string) { told = append(told, text) }
	_, err := pullHTTP(t, l, opt)
	require.ErrorContains(t, err, "not with [not shown] nor [not shown] here")
	for _, text := range append(told, err.Error()) {
		require.NotContains(t, text, "pa55word")
		require.NotContains(t, text, "bWU6")
	}
}

// TestWordsOfServers: what a server says is one line, and does nothing to a terminal.
func TestWordsOfServers(t *testing.T) {
	l := newLying(t)
	l.NewImage(t, noise(93, 100<<10))
	evil := func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"errors":[{"code":"DENIED",` +
			`"message":"a\u001b[2J\u009b1m\nforged: b\u202ec` + strings.Repeat("x", 4000) + `"}]}`))
	}
	said := func() string {
		_, err := pullHTTP(t, l, l.options())
		require.ErrorContains(t, err, "DENIED a?[2J?1m forged: b?c")
		return err.Error()
	}
	for range 2 { // for a part of the blob, and for all of it
		l.Faults = append(l.Faults, func(w http.ResponseWriter, _ *http.Request, _ []byte) bool {
			evil(w)
			return true
		})
	}
	require.Less(t, len(said()), 1000)
	inner := l.Server.Config.Handler
	l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v2/" {
			evil(w)
			return
		}
		inner.ServeHTTP(w, r)
	})
	require.Less(t, len(said()), 1000)
}
