package transport

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestParseSource reads addresses in one spelling, and repeats no secret.
func TestParseSource(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	for text, want := range map[string]string{
		"https://h.example.com/a/f.qcow2":              "https://h.example.com/a/f.qcow2",
		"HTTPS://H.Example.com:443/f@" + digest:        "https://h.example.com/f@" + digest,
		"http://[::1]:80/f":                            "http://[::1]/f",
		"https://h:8443/f?sig=hush@" + digest:          "https://h:8443/f@" + digest,
		"https://h/a@b/f%20g?x=sha256:1":               "https://h/a@b/f%20g",
		"registry.example.com/vm/a:1":                  "registry.example.com/vm/a:1",
		"https://me:hush@h/f":                          "!credentials",
		"https://h/f#" + digest:                        "!@sha256:",
		"https://h/f@sha512:" + strings.Repeat("0", 9): "!digest",
		"https://h/f@sha256:12?hush":                   "!digest",
		"https://h/a/../f":                             "!leave them out",
		"https://h/a/%2e%2e/f":                         "!leave them out",
		"https://h/":                                   "!names no file",
		"https://h?hush":                               "!names no file",
		"https:///f?hush":                              "!cannot be read",
		"https://h h/f?hush":                           "!cannot be read",
	} {
		ref, err := ParseSource(text)
		if problem, ok := strings.CutPrefix(want, "!"); ok {
			require.ErrorContains(t, err, problem, text)
			require.NotContains(t, err.Error(), "hush", text)
			continue
		}
		require.NoError(t, err, text)
		require.Equal(t, want, ref.String())
		require.Equal(t, IsAddress(text), ref.IsAddress())
	}
	_, err := ParseReference("https://h/f?hush")
	require.ErrorContains(t, err, "is an address, not an image reference: write h/f")
	require.NotContains(t, err.Error(), "hush")
}

// TestPrefix covers what lies below it, and nothing that only looks like that.
func TestPrefix(t *testing.T) {
	p, err := ParsePrefix("https://h.example.com/images/")
	require.NoError(t, err)
	for address, want := range map[string]bool{
		"https://h.example.com/images/f":           true,
		"https://H.example.com:443/images/a/f?x=y": true,
		"http://h.example.com/images/f":            false,
		"https://h.example.com:444/images/f":       false,
		"https://h.example.com.evil.org/images/f":  false,
		"https://h.example.com@evil.org/images/f":  false,
		"https://u@h.example.com/images/f":         false,
		"https://h.example.com/images2/f":          false,
		"https://h.example.com/images%2Ff":         false,
		"https://h.example.com/images/../f":        false,
		"https://h.example.com/images/%2e%2e/f":    false,
		"https://h.example.com/images/..%5cf":      false,
	} {
		u, err := url.Parse(address)
		require.NoError(t, err)
		require.Equal(t, want, p.covers(u), address)
	}
	for _, wrong := range []string{"*", "https://", "h.example.com", "https://h/?q", "ftp://h"} {
		_, err := ParsePrefix(wrong)
		require.Error(t, err, wrong)
	}
}

func FuzzChecksums(f *testing.F) {
	f.Add("SHA256 (f) = "+strings.Repeat("0a", 32)+"\n"+strings.Repeat("1b", 32)+" *f\n", "/a/f")
	f.Fuzz(func(t *testing.T, text, path string) {
		if digest, err := digestFor([]byte(text), path); err == nil {
			require.Len(t, digest, 64)
			require.Contains(t, strings.ToLower(text), digest)
		}
	})
}
