package transport

import (
	"strings"
	"testing"
	"time"
)

// FuzzReference parses anything; an accepted reference is accepted again in its printed form.
func FuzzReference(f *testing.F) {
	for _, text := range []string{"a/b:c", "oci:dir:tag", "docker-archive:x.tar",
		"a/b@sha256:" + strings.Repeat("0", 64)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ref, err := ParseReference(text)
		if err != nil {
			return
		}
		if again, err := ParseReference(ref.String()); err != nil ||
			again.Remote() != ref.Remote() ||
			again.Host() != ref.Host() {
			t.Fatalf("%q: %v", text, err)
		}
	})
}

// FuzzManifest reads anything as a manifest, an index and a configuration of credentials.
func FuzzManifest(f *testing.F) {
	f.Add(
		[]byte(
			`{"schemaVersion":2,"layers":[{"digest":"sha256:` + strings.Repeat(
				"0",
				64,
			) + `","size":-1}]}`,
		),
	)
	f.Add([]byte(`{"manifests":[{"platform":{"os":"linux","architecture":"amd64"}}]}`))
	ref, _ := ParseReference("a/b:c")
	f.Fuzz(func(t *testing.T, content []byte) {
		_ = ManifestKind(content, "x")
		if m, err := ParseManifest(content); err == nil {
			for _, l := range m.Layers {
				if l.Size < 0 || l.Digest.Algorithm != "sha256" {
					t.Fatal(l)
				}
			}
		}
		_, _ = OfPlatform(content, ref)
		_ = errorDetail(content, nil)
	})
}

// FuzzHeaders reads anything as the headers of an answer.
func FuzzHeaders(f *testing.F) {
	f.Add("bytes 0-9/10")
	f.Add("120")
	f.Fuzz(func(t *testing.T, value string) {
		if first, total, ok := contentRange(value); ok && (first < 0 || total < -1) {
			t.Fatal(first, total)
		}
		if retryAfter(value, time.Now()) < 0 {
			t.Fatal(value)
		}
	})
}
