package registry

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// lying is a registry that misbehaves, for the client here.
type lying struct{ *registrytest.Lying }

func newLying(t testing.TB) *lying { return &lying{registrytest.NewLying(t)} }

func (l *lying) ref(t testing.TB, name string) transport.Reference {
	ref, err := transport.ParseReference(l.Host() + "/" + name)
	require.NoError(t, err)
	return ref
}

func (l *lying) options() transport.Options {
	return transport.Options{Insecure: []string{l.Host()}}
}
