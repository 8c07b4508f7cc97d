package transport

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
)

// lying is a registry that misbehaves, for the client here.
type lying struct{ *registrytest.Lying }

func newLying(t testing.TB) *lying { return &lying{registrytest.NewLying(t)} }

func (l *lying) ref(t testing.TB, name string) Reference {
	ref, err := ParseReference(l.Host() + "/" + name)
	require.NoError(t, err)
	return ref
}

func (l *lying) options() Options { return Options{Insecure: []string{l.Host()}} }

func newClient(t testing.TB, opt Options) *Client {
	t.Helper()
	c, err := New(opt)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}
