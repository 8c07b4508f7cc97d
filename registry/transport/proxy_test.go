package transport

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
		_, err := New(Options{})
		require.NoError(t, err, value)
	}
}
