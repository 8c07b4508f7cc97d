package loopback

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestIs(t *testing.T) {
	for _, host := range []string{"localhost", "127.0.0.1", "127.8.9.1", "::1",
		"::ffff:127.0.0.1"} {
		require.True(t, Is(host), host)
	}
	for _, host := range []string{"", "localhost.example", "x.localhost", "10.0.0.1", "::",
		"0.0.0.0",
		"127.0.0.1:80", "[::1]", "127.1"} {
		require.False(t, Is(host), host)
	}
}
