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
)

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
