package transport

import (
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode"
)

// A server's text gets into errors and logs. It may repeat secrets of the request: a query that is
// a signature, a password, a token.

const (
	// leastSecret is the length of the shortest secret. Shorter ones would hide words.
	leastSecret = 4
	// maxProblem is the length of the longest part of an explanation that is shown, in bytes.
	maxProblem = 200
	notShown   = "[not shown]"
)

// ourQueries are the names in queries that are no secrets.
var ourQueries = []string{"digest", "mount", "from", "n", "last", "artifactType", "service",
	"scope", "grant_type", "client_id"}

// words is a server's text in answer to a request, in one line that is harmless on a terminal, and
// without secrets of the request or of the requests that were redirected to it.
func words(text string, req *http.Request) string {
	all := secretsOf(req)
	slices.SortFunc(all, func(a, b string) int { return len(b) - len(a) })
	for _, secret := range all {
		if len(secret) >= leastSecret {
			text = strings.ReplaceAll(text, secret, notShown)
		}
	}
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsPrint(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return '?'
	}, text)
}

// problem is a part of a registry's explanation (OCI distribution specification, "Error codes").
func problem(code, message string, req *http.Request) string {
	text := words(strings.TrimSpace(code+" "+message), req)
	return text[:min(len(text), maxProblem)]
}

func secretsOf(req *http.Request) (all []string) {
	for n := 0; req != nil && n <= maxRedirects; n++ {
		if req.URL != nil {
			all = append(all, secretsIn(req.URL.RawQuery)...)
		}
		if _, password, ok := req.BasicAuth(); ok {
			all = append(all, password)
		}
		_, credential, _ := strings.Cut(req.Header.Get("Authorization"), " ")
		all = append(all, credential)
		if req.GetBody != nil && strings.HasPrefix(req.Header.Get("Content-Type"),
			"application/x-www-form-urlencoded") { // a refresh token
			if body, err := req.GetBody(); err == nil {
				form, _ := io.ReadAll(io.LimitReader(body, maxToken))
				_ = body.Close()
				all = append(all, secretsIn(string(form))...)
			}
		}
		if req.Response == nil {
			break
		}
		req = req.Response.Request
	}
	return all
}

// secretsIn are the parts of a query, as written and unescaped.
func secretsIn(query string) (all []string) {
	for part := range strings.SplitSeq(query, "&") {
		name, value, ok := strings.Cut(part, "=")
		if ok && slices.Contains(ourQueries, name) {
			continue
		}
		if !ok {
			value = name
		}
		all = append(all, value)
		if meant, err := url.QueryUnescape(value); err == nil {
			all = append(all, meant)
		}
		if meant, err := url.PathUnescape(value); err == nil {
			all = append(all, meant)
		}
	}
	return all
}

// hiding is an error whose text had secrets.
type hiding struct {
	error
	text string
}

func (h *hiding) Error() string { return h.text }
func (h *hiding) Unwrap() error { return h.error }

// withoutSecrets hides in an error what only the server should know.
func withoutSecrets(err error, req *http.Request) error {
	if text := err.Error(); words(text, req) != text {
		return &hiding{err, words(text, req)}
	}
	return err
}

// errOddRedirect is a redirect that net/http would quote with its query.
var errOddRedirect = errors.New("it redirects to an address that cannot be read")

// checkLocation refuses such a redirect.
func checkLocation(res *http.Response, from *url.URL) error {
	to := res.Header.Get("Location")
	if res.StatusCode/100 != 3 || to == "" {
		return nil
	}
	if _, err := from.Parse(to); err != nil {
		return permanent(errOddRedirect)
	}
	return nil
}
