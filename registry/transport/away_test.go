package transport

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNameOfNobody: a name that does not exist is final, unless the registry has answered before.
func TestNameOfNobody(t *testing.T) {
	c := newClient(t, Options{})
	e, err := c.endpoint("registry.example", "vm/a")
	require.NoError(t, err)
	missing := fmt.Errorf("asking: %w", &net.OpError{Op: "dial", Net: "tcp",
		Err: &net.DNSError{Err: "no such host", Name: "registry.example", IsNotFound: true}})
	err = e.tries().again(t.Context(), explain(missing))
	require.ErrorContains(t, err, "no such host; check the name")
	c.answered.Store("registry.example", true)
	require.NoError(t, e.tries().again(t.Context(), explain(missing)))

	unclear := &net.DNSError{Err: "server misbehaving", Name: "registry.example", IsTemporary: true}
	c.answered.Clear()
	require.NoError(t, e.tries().again(t.Context(), explain(unclear)))
}
