package transport

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/internal/loopback"
)

// address is the address, on a web server, of a file that is a disk by itself.
type address struct {
	url    *url.URL // with its query, which may be a secret
	digest string   // that the file must have; "": unknown
	within []Prefix // where redirects may lead; nil: anywhere
}

// IsAddress reports whether text is an address of a web server, and not the reference of an image.
func IsAddress(text string) bool {
	scheme, _, ok := strings.Cut(text, "://")
	return ok && (strings.EqualFold(scheme, "https") || strings.EqualFold(scheme, "http"))
}

// ParseSource parses a reference as ParseReference does, or the address of a file that is a disk:
// https://HOST/PATH or https://HOST/PATH@sha256:DIGEST, also with http. No error repeats a query.
func ParseSource(text string) (Reference, error) {
	if !IsAddress(text) {
		return ParseReference(text)
	}
	a := new(address)
	if i := strings.LastIndexByte(text, '@'); i >= 0 && strings.HasPrefix(text[i+1:], "sha") &&
		strings.Contains(text[i:], ":") {
		h, err := v1.NewHash(text[i+1:])
		if err != nil || h.Algorithm != "sha256" { // the error may repeat a query
			return Reference{}, errors.New("an address has no valid digest behind the @: write " +
				"sha256: and 64 hexadecimal digits, at the end")
		}
		text, a.digest = text[:i], h.String()
	}
	var err error
	if a.url, err = parseURL(text); err != nil {
		return Reference{}, err
	}
	if _, err = name.NewRegistry(a.url.Host); err != nil {
		return Reference{}, fmt.Errorf("the address of %q has no valid host", a.url.Host)
	}
	if a.url.Path == "" || strings.HasSuffix(a.url.Path, "/") {
		return Reference{}, fmt.Errorf("the address %s names no file", shown(a.url))
	}
	r := Reference{text: shown(a.url), web: a}
	if a.digest != "" {
		r.text += "@" + a.digest
	}
	return r, nil
}

// parseURL parses an address, or a prefix of addresses, in one spelling.
func parseURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || !IsAddress(text) {
		return nil, errors.New("an address cannot be read: write https://HOST/PATH, and special " +
			"characters as %23")
	}
	switch {
	case u.User != nil:
		return nil, fmt.Errorf("a user name or password does not belong into the address of %s: "+
			"credentials come from --registry-config, or from the environment", u.Host)
	case strings.Contains(text, "#"):
		return nil, fmt.Errorf("the address %s has a #: write a digest as @sha256:DIGEST, and the "+
			"character as %%23", shown(u))
	case climbs(u):
		return nil, fmt.Errorf("the address %s has . or .. in its path: leave them out", shown(u))
	}
	u.Host = hostOf(u)
	tidy(u)
	return u, nil
}

// hostOf is the host of an address with its port, in one spelling.
func hostOf(u *url.URL) string {
	host := strings.ToLower(u.Host)
	if u.Scheme == "https" {
		return strings.TrimSuffix(host, ":443")
	}
	return strings.TrimSuffix(host, ":80")
}

// climbs reports whether a path has parts that servers take for parent directories: also with
// parameters (RFC 3986, section 3.3: "..;x"), with blanks, and escaped more than once, because a
// proxy before the server may remove one level of escapes.
func climbs(u *url.URL) bool {
	for path, last := u.Path, ""; path != last; {
		if slices.ContainsFunc(strings.FieldsFunc(path, func(r rune) bool {
			return r == '/' || r == '\\'
		}), isDots) {
			return true
		}
		last = path
		path = unescaped(path)
	}
	return false
}

func isDots(part string) bool {
	part, _, _ = strings.Cut(part, ";")
	part = strings.TrimFunc(part, func(r rune) bool { return r <= ' ' || r == 0x7f })
	return part == "." || part == ".."
}

// escape is a character in hexadecimal.
var escape = regexp.MustCompile(`%[[:xdigit:]]{2}`)

// unescaped removes one level of escapes. Other text stays.
func unescaped(path string) string {
	return escape.ReplaceAllStringFunc(path, func(text string) string {
		c, _ := strconv.ParseUint(text[1:], 16, 8) // it matches
		return string([]byte{byte(c)})
	})
}

// tidy escapes characters that must not be in a query. Everything else stays, because it may be
// signed. Servers and people write blanks.
func tidy(u *url.URL) {
	var out strings.Builder
	for _, c := range []byte(u.RawQuery) {
		if c <= ' ' || c >= 0x7f {
			fmt.Fprintf(&out, "%%%02X", c)
		} else {
			out.WriteByte(c)
		}
	}
	u.RawQuery = out.String()
}

// shown is an address without the parts that may be secret.
func shown(u *url.URL) string { return u.Scheme + "://" + hostOf(u) + u.EscapedPath() }

// file is the name of the file.
func (a *address) file() string { return path.Base(a.url.Path) }

// IsAddress reports whether the reference is the address of a file.
func (r Reference) IsAddress() bool { return r.web != nil }

// Prefix is a prefix of addresses: all of a server, or everything below a path there.
type Prefix struct{ scheme, host, path string }

// ParsePrefix reads https://HOST or https://HOST/PATH, also with http.
func ParsePrefix(text string) (Prefix, error) {
	u, err := parseURL(text)
	if err != nil {
		return Prefix{}, err
	}
	if u.RawQuery != "" {
		return Prefix{}, fmt.Errorf("the beginning of addresses %s has a query: leave it out",
			shown(u))
	}
	return Prefix{u.Scheme, u.Host, strings.TrimSuffix(u.EscapedPath(), "/")}, nil
}

func (p Prefix) String() string { return p.scheme + "://" + p.host + p.path }

// covers compares paths as they are written, because %2F may be a name's slash.
func (p Prefix) covers(u *url.URL) bool {
	at := u.EscapedPath()
	return p.scheme == u.Scheme && p.host == hostOf(u) && !climbs(u) && u.User == nil &&
		(p.path == "" || at == p.path || strings.HasPrefix(at, p.path+"/"))
}

// Within returns the same reference for a caller that may only ask for some addresses. Redirects
// must lead to one of them, too.
func (r Reference) Within(all []Prefix) (Reference, error) {
	if r.web == nil || !covered(all, r.web.url) {
		return r, fmt.Errorf("%s is not below an address that is allowed here", r)
	}
	a := *r.web
	a.within = all
	r.web = &a
	return r, nil
}

func covered(all []Prefix, u *url.URL) bool {
	return slices.ContainsFunc(all, func(p Prefix) bool { return p.covers(u) })
}

// vouched reports whether a server's answers are trusted: by TLS, or because the server is on this
// machine, or because the user says so (Options.Insecure).
func (c *Client) vouched(u *url.URL) bool {
	return u.Scheme == "https" || loopback.Is(u.Hostname()) ||
		slices.Contains(c.opt.Insecure, hostOf(u))
}

// CheckServed returns an error if a reference cannot be served because nothing says which content
// is right: an address without a digest. early reports whether content may be served before its
// digest was checked.
func (c *Client) CheckServed(r Reference) (early bool, err error) {
	switch {
	case r.web == nil:
		return true, nil
	case r.web.digest == "" && c.opt.Checksums == "":
		return false, fmt.Errorf("%s has no digest, so nobody could say whether a guest gets what "+
			"is meant: write %[1]s@sha256:DIGEST, or name a file of digests beside it with "+
			"--checksums; the reference of an image has no https://", r)
	case r.web.digest == "" && r.web.url.RawQuery != "":
		return false, fmt.Errorf("%s has a query and no digest: write the digest, as "+
			"ADDRESS@sha256:DIGEST", r)
	}
	return c.vouched(r.web.url), nil
}
