package transport

import (
	"encoding/binary"
	"net/url"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
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
	p := testtool.Must(ParsePrefix("https://h.example.com/images/"))(t)
	for address, want := range map[string]bool{
		"https://h.example.com/images/f":                  true,
		"https://H.example.com:443/images/a/f?x=y":        true,
		"http://h.example.com/images/f":                   false,
		"https://h.example.com:444/images/f":              false,
		"https://h.example.com.evil.org/images/f":         false,
		"https://h.example.com@evil.org/images/f":         false,
		"https://u@h.example.com/images/f":                false,
		"https://h.example.com/images2/f":                 false,
		"https://h.example.com/images%2Ff":                false,
		"https://h.example.com/images/../f":               false,
		"https://h.example.com/images/%2e%2e/f":           false,
		"https://h.example.com/images/..%5cf":             false,
		"https://h.example.com/images/..;/f":              false,
		"https://h.example.com/images/.%2e;a=b/f":         false,
		"https://h.example.com/images/%252e%252e/f":       false,
		"https://h.example.com/images/%2525252e./f":       false,
		"https://h.example.com/images/%252e%252e%252ff":   false,
		"https://h.example.com/images/..%20/f":            false,
		"https://h.example.com/images/..%2500/f":          false,
		"https://h.example.com/images/..a/f;b/100%25.img": true,
	} {
		require.Equal(t, want, p.covers(testtool.Must(url.Parse(address))(t)), address)
	}
	for _, wrong := range []string{"*", "https://", "h.example.com", "https://h/?q", "ftp://h"} {
		require.Error(t, testtool.Err(ParsePrefix(wrong)), wrong)
	}
}

// TestQueryStaysAsItIs: a query may be signed, so only what must not be in one is escaped.
func TestQueryStaysAsItIs(t *testing.T) {
	ref := testtool.Must(ParseSource("https://h.example.com/a b?x=1%20+%2b é&y"))(t)
	require.Equal(t, "https://h.example.com/a%20b?x=1%20+%2b%20%C3%A9&y", ref.web.url.String())

	digest := testtool.Must(v1.NewHash("sha256:" + strings.Repeat("0a", 32)))(t)
	for at, want := range map[string]string{
		"https://h/u/1":                "digest=sha256%3A" + digest.Hex,
		"https://h/u/1?b=x%20y+&a=%7e": "b=x%20y+&a=%7e&digest=sha256%3A" + digest.Hex,
	} {
		require.Equal(t, want, withDigest(testtool.Must(url.Parse(at))(t), digest).RawQuery)
	}
}

// TestOtherPlaces: what is not read here is not taken for an image of Docker Hub.
func TestOtherPlaces(t *testing.T) {
	for text, want := range map[string]string{
		"s3://bucket/disk.qcow2":        "its https:// address",
		"GS://bucket/disk.qcow2":        "its https:// address",
		"ftp://me:hush@h.example.com/d": "with another program",
		"file:///srv/disk.img":          "its path",
		"file:/srv/disk.img":            "its path",
		"containers-storage:vm":         "skopeo copy",
		"docker-daemon:vm:1":            "skopeo copy",
		"dir:/srv/vm":                   "skopeo copy",
		"nbd://127.0.0.1/disk":          "with another program",
		"docker://s3://bucket/disk":     "its https:// address",
	} {
		for _, parse := range []func(string) (Reference, error){ParseSource, ParseReference} {
			_, err := parse(text)
			require.ErrorContains(t, err, want, text)
			require.NotContains(t, err.Error(), "hush")
		}
	}
	for _, text := range []string{"dir:1", "sif:latest", "s3/a:1", "h.example.com:5000/a",
		"docker://quay.io/a/b:1"} {
		require.NoError(t, testtool.Err(ParseSource(text)), text)
	}
}

// TestSums reads files of digests as publishers write them.
func TestSums(t *testing.T) {
	const path = "/images/15/a.img"
	hex, other := strings.Repeat("0a", 32), strings.Repeat("1b", 32)
	long, blake := strings.Repeat("2c", 64), strings.Repeat("3d", 64)
	want, want512 := sums{sha256: hex}, sums{sha512: long}
	for name, c := range map[string]struct {
		text string
		want sums // zero: an error
	}{
		"coreutils":       {other + "  b.img\n" + hex + " *a.img\n", want},
		"escaped":         {"\\" + hex + "  a.img\n", want},
		"tab":             {hex + "\ta.img\n" + other + "\tb.img", want},
		"--tag":           {"SHA256 (b.img) = " + other + "\nSHA256 (a.img) = " + hex, want},
		"openssl":         {"SHA256(a.img)= " + hex + "\nSHA256(b.img)= " + other, want},
		"openssl 3":       {"SHA2-256(a.img)= " + strings.ToUpper(hex), want},
		"alone":           {hex, want},
		"alone, prefix":   {"sha256:" + hex + "\n", want},
		"alone, named":    {"SHA256 = " + hex, want},
		"standard input":  {hex + "  -\n", want},
		"other name":      {hex + "  a-15.6.0-Build2.109.img\n", want},
		"path elsewhere":  {hex + "  /mnt/build/a.img\n" + other + "  /mnt/build/b.img", want},
		"path on Windows": {hex + ` *C:\out\a.img` + "\n" + other + ` *C:\out\b.img`, want},
		"best path": {other + "  14/a.img\n" + hex + "  ./15/a.img\n" + other + "  a.img.xz\n",
			want},
		"name behind":  {"a.img: " + hex + "\nb.img: " + other, want},
		"BOM":          {"\ufeff" + hex + " *a.img\r\n" + other + " *b.img\r\n", want},
		"certutil":     {"SHA256 hash of a.img:\r\n" + hex + "\r\nCertUtil: done.\r\n", want},
		"Get-FileHash": {"Algorithm  Hash  Path\n---  ---  ---\nSHA256  " + hex + `  C:\a.img`, want},
		"both kinds":   {long + "  a.img\n" + hex + "  a.img\n", want},
		"SHA-512":      {blake + "  b.img\n" + long + "  a.img\n", want512},
		"Gentoo": {"# BLAKE2B HASH\n" + blake + "  a.img\n# SHA512 HASH\n" + long + "  a.img\n",
			want512},
		"SHA-512 alone":      {long, want512},
		"named before alone": {other + "  b.img\n" + long + "  a.img\n", want512},
		"two":                {hex + "\n" + other, sums{}},
		"two of others":      {hex + "  b.img\n" + other + "  c.img", sums{}},
		"twice":              {hex + "  x/a.img\n" + other + "  y/a.img", sums{}},
		"other kinds": {"SHA3-256 (a.img) = " + hex + "\nSM3(a.img)= " + hex +
			"\nBLAKE2b (a.img) = " +
			blake, sums{}},
		"wrong length": {"SHA256 (a.img) = " + long, sums{}},
		"in a text":    {"<a>the digest is " + hex + " of a.img</a>", sums{}},
		"longer":       {hex + "0  a.img", sums{}},
		"empty":        {"", sums{}},
	} {
		t.Run(name, func(t *testing.T) {
			for kind, text := range map[string][]byte{"UTF-8": []byte(c.text),
				"UTF-16LE": utf16Of(binary.LittleEndian, c.text),
				"UTF-16BE": utf16Of(binary.BigEndian, c.text)} {
				got, err := sumsFor(text, path)
				require.Equal(t, c.want, got, kind)
				require.Equal(t, c.want == sums{}, err != nil, kind)
			}
		})
	}
}

// utf16Of is a text in UTF-16, with a mark for its byte order.
func utf16Of(order binary.AppendByteOrder, text string) (out []byte) {
	for _, unit := range utf16.Encode([]rune("\ufeff" + strings.TrimPrefix(text, "\ufeff"))) {
		out = order.AppendUint16(out, unit)
	}
	return out
}

func FuzzChecksums(f *testing.F) {
	f.Add("SHA256 (f) = "+strings.Repeat("0a", 32)+"\n"+strings.Repeat("1b", 32)+" *f\n", "/a/f")
	f.Fuzz(func(t *testing.T, text, path string) {
		found, err := sumsFor([]byte(text), path)
		if err != nil {
			require.Zero(t, found)
			return
		}
		digest := found.sha256 + found.sha512
		require.Contains(t, []int{hex256, hex512}, len(digest))
		require.Contains(t, strings.ToLower(plainText([]byte(text))), digest)
	})
}

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
	f.Add([]byte(`{"schemaVersion":2,"layers":[{"digest":"sha256:` + strings.Repeat("0",
		64) + `","size":-1}]}`))
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
