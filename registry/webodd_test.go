package registry

import (
	"bytes"
	"crypto/sha512"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
)

// TestPullAddressOfOddServers: what a server says of the file, and how it refuses parts, does not
// matter where its content is right.
func TestPullAddressOfOddServers(t *testing.T) {
	content := noise(80, 1<<20)
	backends := func(header string, values ...string) fault {
		return registrytest.Backends(header, values...)
	}
	coded := func(as string) fault { return registrytest.Lies("Content-Encoding", as) }
	for name, c := range map[string]struct {
		always   fault
		noDigest string // the error without a digest; "": there is none
	}{
		"400": {always: registrytest.Refuses(400)},
		"403": {always: registrytest.Refuses(403)},
		"405": {always: registrytest.Refuses(405)},
		"416": {always: registrytest.Refuses(416)},
		"500": {always: registrytest.Refuses(500)},
		"501": {always: registrytest.Refuses(501)},
		"503": {always: registrytest.Refuses(503)},
		"no range in the answer": {always: func(w http.ResponseWriter, r *http.Request,
			content []byte) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusPartialContent)
			}
			_, _ = w.Write(content)
			return true
		}},
		"aws-chunked": {always: coded("aws-chunked")},
		"none":        {always: coded("none")},
		"binary":      {always: coded("binary")},
		"utf-8":       {always: coded("UTF-8")},
		"gzip":        {always: coded("gzip")},
		"br":          {always: coded("gzip, BR"), noDigest: "Content-Encoding"},
		"ETag":        {always: backends("ETag", `"a"`, `"b"`)},
		"Last-Modified": {always: backends("Last-Modified", "Sat, 01 Nov 2025 10:00:00 GMT",
			"Sat, 01 Nov 2025 10:00:01 GMT")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, content)
			w.Always = c.always
			dir, _ := testtool.Must2(w.pull(t, w.Server.URL+webFile+"@"+digestOf(content)))(t)
			onlyFile(t, dir, "out.raw", content)
			dir, _, err := w.pull(t, w.Server.URL+webFile)
			if c.noDigest != "" {
				require.ErrorContains(t, err, c.noDigest)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", content)
		})
	}
}

// chunked sends the file without saying how long it is.
func chunked(w http.ResponseWriter, _ *http.Request, content []byte) bool {
	w.(http.Flusher).Flush()
	_, _ = w.Write(content)
	return true
}

// untilClose sends the file as HTTP/1.0 did: its end is that of the connection.
func untilClose(w http.ResponseWriter, _ *http.Request, content []byte) bool {
	c, out, err := w.(http.Hijacker).Hijack()
	if err == nil {
		_, _ = out.WriteString("HTTP/1.0 200 OK\r\n\r\n")
		_, _ = out.Write(content)
		_ = out.Flush()
		_ = c.Close()
	}
	return true
}

// TestAddressWithoutLength: a file whose length nobody says is refused.
func TestAddressWithoutLength(t *testing.T) {
	content := noise(86, 1<<20)
	for name, always := range map[string]fault{
		"chunked":                   chunked,
		"until the connection ends": untilClose,
		"no total": func(w http.ResponseWriter, r *http.Request, content []byte) bool {
			if first, last, ok := registrytest.RangeOf(r, len(content)); ok {
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/*", first, last))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(content[first : last+1])
				return true
			}
			return chunked(w, r, content)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, content)
			w.Always = always
			at := w.Server.URL + webFile + "@" + digestOf(content)
			dir, _, err := w.pull(t, at)
			require.ErrorContains(t, err, "how long the file is")
			emptyDir(t, dir)
			s := newStreaming(t, newClient(t, w.opt), t.TempDir(), t.TempDir())
			_, err = s.client.Stream(t.Context(), parsed(t, at), s.opt)
			require.ErrorContains(t, err, "how long the file is")
		})
	}
}

// TestStreamAddressBySHA512 serves a file of which only the SHA-512 is known.
func TestStreamAddressBySHA512(t *testing.T) {
	content := noise(85, smallLayer+1<<20)
	w := newWeb(t, content)
	w.Files["/images/SHA512SUMS"] = fmt.Appendf(nil, "%x  f.img\n", sha512.Sum512(content))
	w.opt.Checksums = "SHA512SUMS"
	dir, keep := t.TempDir(), t.TempDir()
	for range 2 {
		s := newStreaming(t, newClient(t, w.opt), dir, keep)
		s.opt.WhenComplete = true
		img := s.disk(t, s.open(t, parsed(t, w.Server.URL+webFile)), "f.img")
		require.True(t, bytes.Equal(content, contentOf(t, img)))
		require.NoError(t, img.Verify(t.Context()))
		w.Always = says(http.StatusNotFound) // the next start needs no server
	}
	w = newWeb(t, content)
	w.Files["/images/SHA512SUMS"] = []byte(strings.Repeat("0a", 64) + "  f.img\n")
	w.opt.Checksums = "SHA512SUMS"
	s := newStreaming(t, newClient(t, w.opt), t.TempDir(), t.TempDir())
	s.opt.WhenComplete = true
	_, err := s.client.Stream(t.Context(), parsed(t, w.Server.URL+webFile), s.opt)
	require.ErrorContains(t, err, "the content of sha512:0a")
}

// TestStreamAddressOfOddServers serves a file that several servers have, and one without ranges.
func TestStreamAddressOfOddServers(t *testing.T) {
	content := noise(85, smallLayer+1<<20)
	for name, always := range map[string]fault{
		"ETag": registrytest.Backends("ETag", `"a"`, `"b"`),
		"416":  registrytest.Refuses(416),
		"501":  registrytest.Refuses(501),
		"aws":  registrytest.Lies("Content-Encoding", "aws-chunked"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, content)
			w.Always = always
			for _, early := range []bool{true, false} {
				s := newStreaming(t, newClient(t, w.opt), t.TempDir(), t.TempDir())
				s.opt.WhenComplete = early
				img := s.disk(t, s.open(t, parsed(t, w.Server.URL+webFile+"@"+
					digestOf(content))), "f.img")
				require.True(t, bytes.Equal(content, contentOf(t, img)))
				if early {
					require.NoError(t, img.Verify(t.Context()))
				}
			}
		})
	}
}
