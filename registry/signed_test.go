package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// listed makes a registry have vm/a:1, a list with one image of a disk, and returns its digest.
func listed(t testing.TB, l *lying, content []byte) string {
	image := l.Image(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content}))
	image.Platform = platformOf(runtime.GOARCH)
	l.Tags["1"] = l.Manifest(t, v1.IndexManifest{SchemaVersion: 2,
		MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{image}})
	return l.Tags["1"].Digest.String()
}

// asking is a client that asks for signatures.
func asking(t testing.TB, l *lying, keys ...string) *Client {
	opt := l.options()
	opt.Timeout = time.Second
	var err error
	opt.Gate, err = signature.NewGate(signature.Options{Keys: keys})
	require.NoError(t, err)
	return newClient(t, opt)
}

// TestUnsigned: however an image is read, without a signature nothing of it is, and nothing is
// kept.
func TestUnsigned(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	l := newLying(t)
	content := noise(120, 1<<20)
	digest := listed(t, l, content)
	dir, keep := t.TempDir(), t.TempDir()
	ways := map[string]func(c *Client) error{
		"pull": func(c *Client) error {
			_, _, err := c.Pull(t.Context(), l.ref(t, "vm/a:1"), filepath.Join(dir, "out.raw"),
				PullOptions{})
			return err
		},
		"stream": func(c *Client) error {
			s := newStreaming(t, c, t.TempDir(), keep)
			st, err := c.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
			if err == nil {
				require.Equal(t, registrytest.Fingerprint(t, key), st.SignedBy())
				err = st.Close()
			}
			return err
		},
		"container": func(c *Client) error {
			_, err := c.Container(t.Context(), l.ref(t, "vm/a:1"), keep)
			return err
		},
		"base": func(c *Client) error {
			_, err := c.Push(t.Context(), []string{rawFile(t)}, l.ref(t, "vm/b:1"),
				PushOptions{Base: l.Host() + "/vm/a:1"})
			return err
		},
	}
	for name, read := range ways {
		err := read(asking(t, l, file))
		require.ErrorAs(t, err, new(*signature.RefusedError), name)
		require.Zero(t, l.Requests("/blobs/"), name)
		require.Equal(t, 0, l.Requests("/manifests/"+digest), name)
		emptyDir(t, dir)
		emptyDir(t, keep)
	}
	l.Sign(t, digest, key)
	require.NoError(t, ways["pull"](asking(t, l, file)))
	onlyFile(t, dir, "out.raw", content)
	require.NoError(t, ways["stream"](asking(t, l, file)))
}

func rawFile(t testing.TB) string {
	file := filepath.Join(t.TempDir(), "b.raw")
	require.NoError(t, os.WriteFile(file, make([]byte, 64<<10), 0o644))
	return file
}

// TestPassedBy: a reader that does not ask gets no blob.
func TestPassedBy(t *testing.T) {
	_, file := registrytest.NewSigner(t)
	l := newLying(t)
	listed(t, l, []byte("a disk"))
	src, err := asking(t, l, file).Source(l.ref(t, "vm/a:1"), "")
	require.NoError(t, err)
	_, _, err = src.Manifest(t.Context(), "")
	require.NoError(t, err)
	_, err = src.Blob(l.Tags["1"])
	require.ErrorContains(t, err, "nobody has asked whether it may be read")
}

// TestSignedLater: the image that was signed is the one that is served, also when its tag has
// moved, and when the registry is away. Keys that are asked for at a later start count then.
func TestSignedLater(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	second, otherFile := registrytest.NewSigner(t)
	l := newLying(t)
	content := noise(121, 1<<20)
	digest := listed(t, l, content)
	l.Sign(t, digest, key)
	dir, keep := t.TempDir(), t.TempDir()
	start := func(keys ...string) (*Stream, *streaming, error) {
		s := newStreaming(t, asking(t, l, keys...), dir, keep)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		st, err := s.client.Stream(ctx, l.ref(t, "vm/a:1"), s.opt)
		if err == nil {
			t.Cleanup(func() { require.NoError(t, st.Close()) })
		}
		return st, s, err
	}
	served := func(key string, st *Stream, s *streaming, err error) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, key, st.SignedBy())
		require.True(t, bytes.Equal(content, contentOf(t, s.disk(t, st, "a.img"))))
	}
	st, s, err := start(file)
	served(registrytest.Fingerprint(t, key), st, s, err)

	listed(t, l, []byte("another disk, which nobody has signed"))
	inner := l.Server.Config.Handler
	l.Server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	st, s, err = start(file)
	served(registrytest.Fingerprint(t, key), st, s, err)
	_, _, err = start(otherFile)
	require.ErrorContains(t, err, "its signatures cannot be read now")

	l.Server.Config.Handler = inner
	_, _, err = start(otherFile)
	require.ErrorContains(t, err, "is by another key")
	l.Sign(t, digest, key, second)
	st, s, err = start(otherFile)
	served(registrytest.Fingerprint(t, second), st, s, err)
}

// TestSignedAfterwards: a disk that was made when nobody asked for signatures is served if its
// image has one, by the list that the record of an earlier version does not name.
func TestSignedAfterwards(t *testing.T) {
	key, file := registrytest.NewSigner(t)
	l := newLying(t)
	content := noise(122, 1<<20)
	digest := listed(t, l, content)
	dir, keep := t.TempDir(), t.TempDir()
	s := newStreaming(t, newClient(t, l.options()), dir, keep)
	ref := l.ref(t, "vm/a:1")
	require.NoError(t, s.open(t, ref).Close())
	name := filepath.Join(keep, recordName(ref.String()))
	text := bytesOf(t, name)
	var r map[string]any
	require.NoError(t, durable.DecodeRecord(text, &r))
	require.Equal(t, digest, r["named"])
	delete(r, "named")
	text, err := json.Marshal(r)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(name, text, 0o600))

	s.client = asking(t, l, file)
	_, err = s.client.Stream(t.Context(), ref, s.opt)
	require.ErrorAs(t, err, new(*signature.RefusedError))
	l.Sign(t, digest, key)
	require.Equal(t, registrytest.Fingerprint(t, key), s.open(t, ref).SignedBy())

	other := listed(t, l, []byte("another disk"))
	l.Sign(t, other, key)
	_, err = s.client.Stream(t.Context(), ref, s.opt)
	require.ErrorAs(t, err, new(*signature.RefusedError), "it is not what the tag names now")
}

var _ transport.Gate = (*signature.Gate)(nil)
