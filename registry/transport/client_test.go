package transport

import (
	"fmt"
	"io"
	"net"
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
