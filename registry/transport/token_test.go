package transport

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
)

// TestPlainBeforeUnknownCertificate: where the registry answers without TLS, whoever answers there
// with a certificate of nobody is not asked.
func TestPlainBeforeUnknownCertificate(t *testing.T) {
	content := registrytest.Noise(64, 100<<10)
	l, other := newLying(t), newLying(t)
	other.TLS(t)
	l.NewImage(t, content)
	opt := l.options()
	opt.Timeout = time.Second
	c := newClient(t, opt)
	for _, transport := range []*http.Transport{c.base, c.open} { // as on ports 443 and 80
		transport.DialTLSContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			conn, err := tls.Dial(network, other.Host(), transport.TLSClientConfig)
			if err != nil {
				return nil, err
			}
			return conn, nil
		}
	}
	src, err := c.Source(l.ref(t, "vm/a:1"), "")
	require.NoError(t, err)
	_, _, err = src.Manifest(t.Context(), "")
	require.NoError(t, err)
	require.Zero(t, other.Requests(""))
	a, err := c.endpoint(l.Host(), "vm/b")
	require.NoError(t, err)
	_, err = a.authorize(t.Context(), pullScopes(a)) // as for a push
	require.NoError(t, err)
	require.Zero(t, other.Requests(""))
}
