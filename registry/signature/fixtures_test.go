package signature

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// signedImage is a registry with an image, and what reads it.
type signedImage struct {
	*registrytest.Lying
	digest  string
	content []byte // of its manifest
	opt     transport.Options
}

func newImage(t testing.TB) *signedImage {
	l := registrytest.NewLying(t)
	l.NewImage(t, []byte("a disk"))
	digest := l.Tags["1"].Digest.String()
	return &signedImage{Lying: l, digest: digest, content: l.Store[digest],
		opt: transport.Options{Insecure: []string{l.Host()}, Timeout: time.Second,
			Idle: 5 * time.Second}}
}

func (s *signedImage) ref(t testing.TB, name string) transport.Reference {
	return testtool.Must(transport.ParseReference(s.Host() + "/vm/a" + name))(t)
}

// resolve resolves vm/a:1 with what is asked for.
func (s *signedImage) resolve(t testing.TB, opt Options) (*transport.Image, error) {
	t.Helper()
	return s.resolveRef(t, s.ref(t, ":1"), opt)
}

func (s *signedImage) resolveRef(t testing.TB, ref transport.Reference, opt Options) (
	*transport.Image, error) {
	t.Helper()
	with := s.opt
	var err error
	with.Gate = testtool.Must(NewGate(opt))(t)
	c := testtool.Must(transport.New(with))(t)
	defer c.Close()
	img, err := c.Resolve(context.Background(), ref)
	if err == nil {
		require.NoError(t, img.Source.Close())
	}
	return img, err
}

// refused checks that the image is refused, for this reason, and that nothing of it was read.
func (s *signedImage) refused(t testing.TB, opt Options, why string) {
	t.Helper()
	_, err := s.resolve(t, opt)
	var no *RefusedError
	require.ErrorAs(t, err, &no)
	require.Contains(t, err.Error(), why)
}

// written writes a file.
func written(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}
