package registry

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// web is a web server with a file, and a client that trusts it.
type web struct {
	*registrytest.Web
	opt  transport.Options
	told warnings
}

const webFile = "/images/f.img"

func newWeb(t testing.TB, content []byte) *web {
	w := &web{Web: registrytest.NewWeb(t)}
	w.Put(webFile, content, `"1"`)
	w.opt = transport.Options{CA: w.CA(t), Timeout: 2 * time.Second, Warn: w.told.add}
	return w
}

func parsed(t testing.TB, text string) transport.Reference {
	return testtool.Must(transport.ParseSource(text))(t)
}

// pull fetches an address into a new directory.
func (w *web) pull(t testing.TB, address string) (dir, digest string, err error) {
	dir = t.TempDir()
	_, digest, err = newClient(t, w.opt).Pull(t.Context(), parsed(t, address),
		filepath.Join(dir, "out.raw"), PullOptions{})
	return dir, digest, err
}

// TestPullAddress fetches files as web servers have them. Whatever happens on the way, there is the
// whole content under the name, or no file.
func TestPullAddress(t *testing.T) {
	content := noise(80, 1<<20)
	const secret = "X-Signature=hush"
	for name, c := range map[string]struct {
		file   []byte // nil: the content
		suffix string // of the address; "": the digest of the file
		faults []fault
		server func(w *web)
		want   string // in the error
	}{
		"digest": {},
		"qcow2":  {file: qcow2Of(t, content, "-c")},
		"xz":     {file: packtest.Xz(qcow2Of(t, content))},
		"tar": {file: gzipped(t, tarOf(t, tarFile{Name: "a/README", Content: []byte("x")},
			tarFile{Name: "a/disk.raw", Content: content}))},
		"no digest":        {suffix: "?"},
		"query":            {suffix: "?" + secret},
		"wrong digest":     {suffix: "@" + digestOf([]byte("x")), want: "the content of sha256:"},
		"no digest at all": {suffix: "@sha256:" + strings.Repeat("0", 64), want: "all zeros"},
		"no ranges":        {server: func(w *web) { w.NoRanges = true }},
		"cut": {faults: []fault{nil, cut(1000), cut(5000),
			says(http.StatusServiceUnavailable)}},
		"all instead of the rest": {faults: []fault{nil, cut(70000), registrytest.Whole}},
		"redirect":                {faults: []fault{registrytest.Redirects(webFile)}},
		"redirect with blanks": {faults: []fault{func(w http.ResponseWriter, _ *http.Request,
			_ []byte) bool {
			w.Header().Set("Location", webFile+"?name=my disk.img")
			w.WriteHeader(http.StatusFound)
			return true
		}}},
		"other range":       {faults: []fault{nil, registrytest.OtherRange}},
		"other range first": {faults: []fault{registrytest.OtherRange}},
		"loop": {server: func(w *web) {
			for range 20 {
				w.Faults = append(w.Faults, registrytest.Redirects(webFile+"?"+secret))
			}
		}, want: "asking the server: stopped after 10 redirects"},
		"without TLS": {faults: []fault{registrytest.Redirects("http://127.0.0.1:1/")},
			want: "without TLS"},
		"elsewhere": {faults: []fault{registrytest.Redirects("file:///etc/passwd")},
			want: `an address of "file"`},
		"missing":  {suffix: ".gone?" + secret, want: "404"},
		"an image": {suffix: ":42", want: `in a registry, leave out "https://"`},
		"expired": {suffix: "?" + secret, faults: []fault{says(403), says(403)},
			want: "have expired"},
		"empty": {want: "is empty", server: func(w *web) {
			w.NoRanges, w.Files[webFile] = true, nil
		}},
		"no first byte": {want: "is empty", server: func(w *web) {
			w.Always, w.Files[webFile] = registrytest.Refuses(416), nil
		}},
		"shorter": {faults: []fault{nil, cut(1000), says(416), func(w http.ResponseWriter,
			r *http.Request, content []byte) bool {
			_, _ = w.Write(content[:999])
			return true
		}}, want: "it was replaced"},
		"replaced": {faults: []fault{nil, cut(1000), func(w http.ResponseWriter, r *http.Request,
			content []byte) bool {
			w.Header().Set("ETag", `"2"`)
			return cut(1<<20)(w, r, flipped(content, 500000))
		}}, want: "the content of sha256:"},
		"longer": {faults: []fault{nil, func(w http.ResponseWriter, r *http.Request,
			content []byte) bool {
			return cut(1<<20)(w, r, append(content, 1))
		}}, want: "it was replaced"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := c.file
			if file == nil {
				file = content
			}
			w := newWeb(t, file)
			w.Fail(c.faults...)
			if c.server != nil {
				c.server(w)
			}
			suffix := cmp.Or(c.suffix, "@"+digestOf(file))
			dir, digest, err := w.pull(t, w.Server.URL+webFile+suffix)
			for _, text := range append(w.told.all(), fmt.Sprint(err)) {
				require.NotContains(t, text, "hush")
			}
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			require.Equal(t, digestOf(file), digest)
			onlyFile(t, dir, "out.raw", content)
		})
	}
}

// TestPullAddressTwice reads a file of unknown digest twice, as for standard output. What comes the
// second time must be the same.
func TestPullAddressTwice(t *testing.T) {
	content := noise(81, 1<<20)
	w := newWeb(t, content)
	pulled := func(faults ...fault) (out bytes.Buffer, digest string, err error) {
		w.Fail(faults...)
		_, digest, err = newClient(t, w.opt).Pull(t.Context(), parsed(t, w.Server.URL+webFile),
			"-", PullOptions{Stdout: &out})
		return out, digest, err
	}
	out, digest := testtool.Must2(pulled())(t)
	require.Equal(t, digestOf(content), digest)
	require.True(t, bytes.Equal(content, out.Bytes()))

	_, _, err := pulled(nil, nil, func(to http.ResponseWriter, r *http.Request, _ []byte) bool {
		return cut(len(content))(to, r, flipped(content, 9000))
	})
	require.ErrorContains(t, err, "the content of "+digestOf(content))
}

// TestChecksums finds the digest in a file beside the address, and believes it only with TLS.
func TestChecksums(t *testing.T) {
	content := noise(82, 200<<9)
	hex := strings.TrimPrefix(digestOf(content), "sha256:")
	other := strings.TrimPrefix(digestOf([]byte("x")), "sha256:")
	long := sha512.Sum512(content)
	for name, c := range map[string]struct{ sums, setting, want string }{
		"among others": {sums: other + "  g.img\n" + hex + " *f.img\n"},
		"elsewhere":    {sums: hex + "  f.img", setting: "../sums/all"},
		"SHA-512":      {sums: fmt.Sprintf("%x  f.img", long)},
		"wrong":        {sums: other + "  f.img\n", want: "the content of sha256:" + other},
		"wrong SHA-512": {sums: strings.Repeat("0a", 64) + "  f.img\n",
			want: "the content of sha512:0a"},
		"two digests": {sums: hex + "  f.img\n" + other + "  f.img\n", want: "twice"},
		"all zeros":   {sums: strings.Repeat("0", 64) + "  f.img\n", want: "all zeros"},
		"none":        {sums: "<html>" + hex + "  f.img\n", want: "no SHA-256"},
		"long":        {sums: strings.Repeat("x", 1<<20+1), want: "more than 1048576 bytes"},
		"gone":        {setting: "nothing", want: "404"},
		"plain":       {setting: "http://192.0.2.1/SHA256SUMS", want: "without TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, content)
			w.Files["/images/SHA256SUMS"], w.Files["/sums/all"] = []byte(c.sums), []byte(c.sums)
			if w.opt.Checksums = "SHA256SUMS"; c.setting != "" {
				w.opt.Checksums = c.setting
			}
			dir, digest, err := w.pull(t, w.Server.URL+webFile)
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			require.Equal(t, digestOf(content), digest)
		})
	}
}

// TestAddressCredentials: a credential goes to the host that it is for, and by TLS only. Nobody
// learns the address that led there.
func TestAddressCredentials(t *testing.T) {
	content := noise(83, 200<<9)
	w, other := newWeb(t, content), newWeb(t, content)
	w.Basic = "me:hush"
	login := filepath.Join(t.TempDir(), "config.json")
	auth := base64.StdEncoding.EncodeToString([]byte("me:hush"))
	require.NoError(t, os.WriteFile(login, fmt.Appendf(nil,
		`{"auths": {%q: {"auth": %q}, "other.example.com": {"auth": %[2]q}}}`,
		w.Host()+"/images", auth), 0o600))
	require.ErrorContains(t, testtool.Err2(w.pull(t, w.Server.URL+webFile)), "401")
	w.opt.Config = login
	require.NoError(t, testtool.Err2(w.pull(t, w.Server.URL+webFile)))

	// Both have the same certificate.
	w.Fail(registrytest.Redirects(other.Server.URL+webFile+"?a=hush"),
		registrytest.Redirects(other.Server.URL+webFile+"?a=hush"))
	require.NoError(t, testtool.Err2(w.pull(t, w.Server.URL+webFile+"?b=hush@"+digestOf(content))))
	require.NotEmpty(t, other.Said())
	for _, r := range other.Said() {
		require.Empty(t, r.Header.Get("Authorization"))
		require.Empty(t, r.Referer())
	}
	// Nor does it come back when a redirect leads back.
	w.Basic = ""
	w.Fail(registrytest.Redirects(other.Server.URL + webFile))
	other.Fail(registrytest.Redirects(w.Server.URL + webFile))
	before := len(w.Said())
	require.NoError(t, testtool.Err2(w.pull(t, w.Server.URL+webFile)))
	require.NotEmpty(t, w.Said()[before].Header.Get("Authorization"))
	require.Empty(t, w.Said()[before+1].Header.Get("Authorization"))
}

// TestPlainAddress: without TLS nothing but a digest says what is right, and it is checked before
// anything is served.
func TestPlainAddress(t *testing.T) {
	content := noise(84, smallLayer+1<<20)
	server := registrytest.NewPlainWeb(t)
	server.Put(webFile, content, `"1"`)
	// This is no address of this machine, to which one may speak without TLS, but leads there.
	_, port := testtool.Must2(net.SplitHostPort(server.Host()))(t)
	address := "http://0.0.0.0:" + port + webFile
	c := newClient(t, transport.Options{Timeout: time.Second})
	_, _, err := c.Pull(t.Context(), parsed(t, address), filepath.Join(t.TempDir(), "a.raw"),
		PullOptions{})
	require.ErrorContains(t, err, "without TLS nothing else says what is right")
	ref := parsed(t, address+"@"+digestOf(content))
	s := newStreaming(t, c, t.TempDir(), t.TempDir())
	s.opt.WhenComplete = true
	img := s.disk(t, s.open(t, ref), "f.img")
	require.False(t, img.Unverified())
	require.True(t, bytes.Equal(content, contentOf(t, img)))

	server.Put(webFile, flipped(content, 1<<20), `"1"`)
	s = newStreaming(t, c, t.TempDir(), t.TempDir())
	s.opt.WhenComplete = true
	_, err = c.Stream(t.Context(), ref, s.opt)
	require.ErrorContains(t, err, "the content of "+digestOf(content))

	_, err = newClient(t, transport.Options{Timeout: time.Second, Checksums: "SHA256SUMS"}).
		Stream(t.Context(), parsed(t, address), s.opt)
	require.ErrorContains(t, err, "without TLS")
}

// TestStreamAddress serves a file by ranges, knows it again without the server, and notices that it
// was replaced.
func TestStreamAddress(t *testing.T) {
	content := noise(85, smallLayer+3<<20)
	w := newWeb(t, content)
	ref := parsed(t, w.Server.URL+webFile+"?signature=hush@"+digestOf(content))
	require.Equal(t, w.Server.URL+webFile+"@"+digestOf(content), ref.String())
	dir, keep := t.TempDir(), t.TempDir()
	serve := func() *streaming {
		s := newStreaming(t, newClient(t, w.opt), dir, keep)
		s.opt.WhenComplete = true
		return s
	}
	s := serve()
	st := s.open(t, ref)
	require.Equal(t, []string{"f.img"}, namesOfDisks(st.Disks()))
	img := s.disk(t, st, "f.img")
	require.True(t, img.Unverified())
	p := readAt(t, img, 20<<20, 1<<20)
	require.True(t, bytes.Equal(content[20<<20:21<<20], p))
	require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(4<<20))

	// Without the server, the image is known, and so is what was read. Another signature makes no
	// difference.
	asked := len(w.Said())
	again := serve()
	other := parsed(t, w.Server.URL+webFile+"?signature=new@"+digestOf(content))
	st2 := again.open(t, other)
	requireSameDigests(t, st, st2)
	digest, platform := st2.Digests()
	require.Equal(t, digestOf(content), digest, "the one that others publish")
	require.Empty(t, platform)
	img2 := again.disk(t, st2, "f.img")
	require.Equal(t, img.Unhashed()[0].Digest, img2.Unhashed()[0].Digest)
	require.NoError(t, testtool.Err(img2.ReadAt(t.Context(), p, 20<<20)))
	require.Len(t, w.Said(), asked)
	files, err := filepath.Glob(filepath.Join(keep, "*"))
	require.NoError(t, err)
	for _, f := range files {
		require.NotContains(t, string(bytesOf(t, f)), "hush", f)
	}

	// A file of another length is no content. One of the same length is found out at the end.
	w.Put(webFile, noise(86, len(content)+512), `"2"`)
	for _, one := range []int64{8 << 20, 30 << 20} {
		_, err = img2.ReadAt(t.Context(), p[:4096], one)
		require.ErrorIs(t, err, disk.ErrWrongContent)
		require.ErrorContains(t, err, "it was replaced")
	}
	require.NoError(t, testtool.Err(img2.ReadAt(t.Context(), p, 20<<20))) // is here
	w.Put(webFile, content, `"1"`)                                        // The right one is back.
	require.NoError(t, testtool.Err(img2.ReadAt(t.Context(), p[:4096], 8<<20)))
	w.Put(webFile, noise(86, len(content)), `"2"`)
	require.ErrorIs(t, img2.Verify(t.Context()), disk.ErrWrongContent)
	require.ErrorIs(t, testtool.Err(img2.ReadAt(t.Context(), p, 20<<20)), disk.ErrWrongContent)
	for _, text := range w.told.all() {
		require.NotContains(t, text, "hush")
	}
}

// TestStreamAddressWithoutDigest: nobody could say what is right.
func TestStreamAddressWithoutDigest(t *testing.T) {
	content := noise(87, 200<<9)
	w := newWeb(t, content)
	s := newStreaming(t, newClient(t, w.opt), t.TempDir(), t.TempDir())
	_, err := s.client.Stream(t.Context(), parsed(t, w.Server.URL+webFile), s.opt)
	require.ErrorContains(t, err, "has no digest")
	require.Empty(t, w.Said())

	w.Files["/images/SUMS"] = []byte(strings.TrimPrefix(digestOf(content), "sha256:") + "  f.img")
	w.opt.Checksums = "SUMS"
	s = newStreaming(t, newClient(t, w.opt), t.TempDir(), t.TempDir())
	_, err = s.client.Stream(t.Context(), parsed(t, w.Server.URL+webFile+"?id=7"), s.opt)
	require.ErrorContains(t, err, "has a query and no digest")
	st := s.open(t, parsed(t, w.Server.URL+webFile))
	require.True(t, bytes.Equal(content, contentOf(t, s.disk(t, st, "f.img"))))
}

// TestAddressPolicy: no signature covers an address, so only a policy can allow it.
func TestAddressPolicy(t *testing.T) {
	w := newWeb(t, noise(88, 200<<9))
	_, key := registrytest.NewSigner(t)
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	pulled := func(opt signature.Options) error {
		var err error
		w.opt.Gate = testtool.Must(signature.NewGate(opt))(t)
		_, _, err = w.pull(t, w.Server.URL+webFile)
		return err
	}
	require.ErrorContains(t, pulled(signature.Options{Keys: []string{key}}),
		"is at an address, where no signature can be")
	require.NoError(t, os.WriteFile(policy, []byte("default: deny\n"), 0o600))
	require.ErrorContains(t, pulled(signature.Options{Policy: policy}), "is in no registry")
	require.NoError(t, os.WriteFile(policy, []byte(
		"images: [{prefix: '*', action: allow}]\n"), 0o600))
	require.NoError(t, pulled(signature.Options{Policy: policy}))
}

// TestAddressSilent: a server cannot keep a pull waiting for ever.
func TestAddressSilent(t *testing.T) {
	w := newWeb(t, noise(89, 200<<9))
	w.opt.Idle, w.opt.Timeout = 100*time.Millisecond, 300*time.Millisecond
	hang := func(_ http.ResponseWriter, r *http.Request, _ []byte) bool {
		<-r.Context().Done()
		return true
	}
	w.Fail(hang, hang, hang, hang, hang, hang, hang, hang)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, _, err := newClient(t, w.opt).Pull(ctx, parsed(t, w.Server.URL+webFile),
		filepath.Join(t.TempDir(), "a.raw"), PullOptions{})
	require.ErrorContains(t, err, "given up")
}
