package registry

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
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
	opt.Gate = testtool.Must(signature.NewGate(signature.Options{Keys: keys}))(t)
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
		require.ErrorAs(t, read(asking(t, l, file)), new(*signature.RefusedError), name)
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
	src := testtool.Must(asking(t, l, file).Source(l.ref(t, "vm/a:1"), ""))(t)
	require.NoError(t, testtool.Err2(src.Manifest(t.Context(), "")))
	_, err := src.Blob(l.Tags["1"])
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
	require.ErrorContains(t, testtool.Err2(start(otherFile)), "its signatures cannot be read now")

	l.Server.Config.Handler = inner
	require.ErrorContains(t, testtool.Err2(start(otherFile)), "is by another key")
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
	text = testtool.Must(json.Marshal(r))(t)
	require.NoError(t, os.WriteFile(name, text, 0o600))

	s.client = asking(t, l, file)
	_, err := s.client.Stream(t.Context(), ref, s.opt)
	require.ErrorAs(t, err, new(*signature.RefusedError))
	l.Sign(t, digest, key)
	require.Equal(t, registrytest.Fingerprint(t, key), s.open(t, ref).SignedBy())

	other := listed(t, l, []byte("another disk"))
	l.Sign(t, other, key)
	_, err = s.client.Stream(t.Context(), ref, s.opt)
	require.ErrorAs(t, err, new(*signature.RefusedError), "it is not what the tag names now")
}

var _ transport.Gate = (*signature.Gate)(nil)

// newPrivateKey makes a key that signs, and a file with its public part.
func newPrivateKey(t testing.TB) (*signature.PrivateKey, string) {
	key := testtool.Must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	der := testtool.Must(x509.MarshalPKCS8PrivateKey(key))(t)
	signs, err := signature.ParsePrivateKey(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY",
		Bytes: der}), nil)
	require.NoError(t, err)
	return signs, registrytest.PublicKey(t, key)
}

// TestPushSigned: what push has signed is admitted. Further keys are added, and the same one is
// not. An image that cannot be signed gets no tag.
func TestPushSigned(t *testing.T) {
	m := newMemory(t)
	file := rawFile(t)
	first, firstFile := newPrivateKey(t)
	second, secondFile := newPrivateKey(t)
	push := func(tag string, key *signature.PrivateKey) (string, error) {
		return m.client(t).Push(t.Context(), []string{file}, m.ref(t, "vm/a:"+tag),
			PushOptions{Base: BaseNone, Sign: key})
	}
	pull := func(tag string, keys ...string) error {
		opt := transport.Options{Insecure: []string{m.host}}
		var err error
		opt.Gate = testtool.Must(signature.NewGate(signature.Options{Keys: keys}))(t)
		_, _, err = newClient(t, opt).Pull(t.Context(), m.ref(t, "vm/a:"+tag),
			filepath.Join(t.TempDir(), "out.raw"), PullOptions{})
		return err
	}
	digest := testtool.Must(push("1", first))(t)
	require.NoError(t, pull("1", firstFile))
	require.ErrorContains(t, pull("1", secondFile), "is by another key")
	require.Equal(t, digest, testtool.Must(push("1", first))(t))
	require.NoError(t, testtool.Err(push("1", second)))
	require.NoError(t, pull("1", firstFile))
	require.NoError(t, pull("1", secondFile))

	tag := strings.Replace(digest, ":", "-", 1) + ".sig"
	at := "http://" + m.host + "/v2/vm/a/manifests/" + tag
	res := testtool.Must(http.Get(at))(t)
	var made v1.Manifest
	require.NoError(t, json.NewDecoder(res.Body).Decode(&made))
	require.NoError(t, res.Body.Close())
	require.Len(t, made.Layers, 2, "one of each key")

	// What a registry has lost of a signature is there again when the image is signed again.
	lost := testtool.Must(http.NewRequest(http.MethodDelete,
		"http://"+m.host+"/v2/vm/a/blobs/"+made.Layers[0].Digest.String(), nil))(t)
	res = testtool.Must(http.DefaultClient.Do(lost))(t)
	require.NoError(t, res.Body.Close())
	require.ErrorContains(t, pull("1", firstFile), "its signature is incomplete")
	require.NoError(t, testtool.Err(push("1", first)))
	require.NoError(t, pull("1", firstFile))

	var sent atomic.Int64
	u, err := m.client(t).Uploader(m.ref(t, "vm/a:1"), transport.Reference{}, &sent, "")
	require.NoError(t, err)
	require.NoError(t, u.Manifest(t.Context(), tag, string(made.MediaType), []byte("garbage")))
	require.NoError(t, os.WriteFile(file, make([]byte, 64<<10), 0o644))
	require.ErrorContains(t, testtool.Err(push("2", first)), "the signatures of "+digest)
	require.ErrorContains(t, pull("2", firstFile), "does not exist")
}
