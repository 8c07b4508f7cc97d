package transport

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
)

// TestFetchWaitsForItsReader: time in which nobody reads does not count as time in which nothing
// comes. Layers of container images are opened before they are read.
func TestFetchWaitsForItsReader(t *testing.T) {
	l := newLying(t)
	content := registrytest.Noise(23, 1<<20)
	desc := l.Add(content)
	l.Faults = []registrytest.Fault{registrytest.Few(1000, 100*time.Millisecond)}
	src := testtool.Must(newClient(t, l.options()).Source(l.ref(t, "vm/a:1"), ""))(t)
	t.Cleanup(func() { require.NoError(t, src.Close()) })
	in := testtool.Must(src.Blob(desc))(t).Stream(t.Context(), 0, desc.Size)
	defer in.Close()
	got := make([]byte, len(content))
	require.NoError(t, testtool.Err(io.ReadFull(in, got[:1000])))
	f := in.fetch
	if x, ok := f.body.(*exchange); ok { // otherwise the cut was noticed already
		require.False(t, x.timer.Stop(), "the timer runs although nobody reads")
	}
	for _, at := range []*time.Time{&f.read, &f.last, &f.tries.last} {
		*at = at.Add(-time.Hour)
	}
	require.NoError(t, testtool.Err(io.ReadFull(in, got[1000:])))
	require.Equal(t, content, got)
}

// TestNoPasswordInAMessage: credentials in a wrong place are not shown.
func TestNoPasswordInAMessage(t *testing.T) {
	for _, opt := range []Options{{Insecure: []string{"u:precious@a:1"}},
		{Mirrors: []string{"a=u:precious@b"}}, {Mirrors: []string{"u:precious@a=b"}}} {
		_, err := New(opt)
		require.ErrorContains(t, err, "not shown")
		require.NotContains(t, err.Error(), "precious")
	}
}

// TestWrongOptionsNameTheirSettings: a person sees which of the settings is wrong.
func TestWrongOptionsNameTheirSettings(t *testing.T) {
	for want, opt := range map[string]Options{
		"--registry-config (REGISTRY_CONFIG): ":     {Config: "/none"},
		"--registry-ca (REGISTRY_CA): ":             {CA: "/none"},
		"--registry-mirror (REGISTRY_MIRROR): ":     {Mirrors: []string{"a"}},
		"--insecure-registry (INSECURE_REGISTRY): ": {Insecure: []string{"http://a"}},
	} {
		require.ErrorContains(t, testtool.Err(New(opt)), want)
	}
}

// TestCertificateThatNoAuthorityMakesGood: one more authority would not help.
func TestCertificateThatNoAuthorityMakesGood(t *testing.T) {
	for want, err := range map[string]error{
		"--insecure-registry": x509.CertificateInvalidError{Reason: x509.Expired},
		"another certificate": x509.HostnameError{Certificate: &x509.Certificate{}, Host: "b"},
		"by --registry-ca":    x509.UnknownAuthorityError{},
	} {
		err = explain(&tls.CertificateVerificationError{Err: err})
		require.ErrorContains(t, err, want)
		require.ErrorAs(t, err, new(*permanentError))
	}
}

// TestProxyThatIsNone: an address of a proxy that nobody can read is refused and not ignored. The
// password in it is not shown.
func TestProxyThatIsNone(t *testing.T) {
	for _, value := range []string{"http://me:pa%ss@proxy:3128", "me:pa#ss@proxy", "http://",
		"http://me:pa/ss@proxy:3128"} {
		t.Setenv("HTTPS_PROXY", value)
		_, err := New(Options{})
		require.ErrorContains(t, err, "HTTPS_PROXY is not the address of a proxy", value)
		require.NotContains(t, err.Error(), "me:")
	}
	for _, value := range []string{"", "proxy", "proxy:3128", "10.0.0.1:3128", "http://proxy",
		"socks5://proxy:1080", "http://me:pa%23ss@proxy:3128"} {
		t.Setenv("HTTPS_PROXY", value)
		require.NoError(t, testtool.Err(New(Options{})), value)
	}
}

// TestNameOfNobody: a name that does not exist is final, unless the registry has answered before.
func TestNameOfNobody(t *testing.T) {
	c := newClient(t, Options{})
	e := testtool.Must(c.endpoint("registry.example", "vm/a"))(t)
	missing := fmt.Errorf("asking: %w", &net.OpError{Op: "dial", Net: "tcp",
		Err: &net.DNSError{Err: "no such host", Name: "registry.example", IsNotFound: true}})
	err := e.tries().waitForRetry(t.Context(), explain(missing))
	require.ErrorContains(t, err, "no such host; check the name")
	c.answered.Store("registry.example", true)
	require.NoError(t, e.tries().waitForRetry(t.Context(), explain(missing)))

	unclear := &net.DNSError{Err: "server misbehaving", Name: "registry.example", IsTemporary: true}
	c.answered.Clear()
	require.NoError(t, e.tries().waitForRetry(t.Context(), explain(unclear)))
}

// lying is a registry that misbehaves, for the client here.
type lying struct{ *registrytest.Lying }

func newLying(t testing.TB) *lying { return &lying{registrytest.NewLying(t)} }

func (l *lying) ref(t testing.TB, name string) Reference {
	return testtool.Must(ParseReference(l.Host() + "/" + name))(t)
}

func (l *lying) options() Options { return Options{Insecure: []string{l.Host()}} }

func newClient(t testing.TB, opt Options) *Client {
	t.Helper()
	c := testtool.Must(New(opt))(t)
	t.Cleanup(c.Close)
	return c
}

func mustURL(t *testing.T, text string) *url.URL {
	return testtool.Must(url.Parse(text))(t)
}

// TestUnfinished: the notes belong to one push at a time, and are forgotten after some days.
func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	a := rememberUpload(dir, "host/vm", "sha256:1")
	require.NotNil(t, a)
	require.Nil(t, a.location())
	require.Nil(t, rememberUpload(dir, "host/vm", "sha256:1"), "another process sends it")
	for _, repository := range []string{"host/other", "other/vm"} {
		other := rememberUpload(dir, repository, "sha256:1")
		require.NotNil(t, other)
		other.close()
	}
	at := mustURL(t, "https://host/v2/vm/blobs/uploads/1?_state=abc&x=1")
	a.remember(mustURL(t, at.String()+"and-much-longer"))
	a.remember(at)
	a.close()
	a = rememberUpload(dir, "host/vm", "sha256:1")
	require.Equal(t, at, a.location())
	a.close()
	names := testtool.Must(os.ReadDir(dir))(t)
	require.Len(t, names, 1)
	forgetOld(dir, time.Now().Add(time.Hour))
	names = testtool.Must(os.ReadDir(dir))(t)
	require.Empty(t, names)

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	none := rememberUpload(filepath.Join(file, "below"), "host/vm", "sha256:1")
	require.Nil(t, none)
	none.remember(at) // of nothing
	none.forget()
	none.close()
}

// TestNextPiece: pieces take some seconds each.
func TestNextPiece(t *testing.T) {
	for _, c := range []struct {
		size int64
		took time.Duration
		want int64
	}{
		{firstPiece, 0, 2 * firstPiece},
		{largestPiece, 0, largestPiece},
		{2 * firstPiece, 2 * time.Second, 2 * firstPiece},
		{2 * firstPiece, 5 * time.Second, firstPiece},
		{firstPiece, time.Minute, firstPiece},
	} {
		require.Equal(t, c.want, nextPiece(c.size, c.took))
	}
}
