package registry

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// newPrivateKey makes a key that signs, and a file with its public part.
func newPrivateKey(t testing.TB) (*signature.PrivateKey, string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
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
		opt.Gate, err = signature.NewGate(signature.Options{Keys: keys})
		require.NoError(t, err)
		_, _, err = newClient(t, opt).Pull(t.Context(), m.ref(t, "vm/a:"+tag),
			filepath.Join(t.TempDir(), "out.raw"), PullOptions{})
		return err
	}
	digest, err := push("1", first)
	require.NoError(t, err)
	require.NoError(t, pull("1", firstFile))
	require.ErrorContains(t, pull("1", secondFile), "is by another key")
	again, err := push("1", first)
	require.NoError(t, err)
	require.Equal(t, digest, again)
	_, err = push("1", second)
	require.NoError(t, err)
	require.NoError(t, pull("1", firstFile))
	require.NoError(t, pull("1", secondFile))

	tag := strings.Replace(digest, ":", "-", 1) + ".sig"
	at := "http://" + m.host + "/v2/vm/a/manifests/" + tag
	res, err := http.Get(at)
	require.NoError(t, err)
	var made v1.Manifest
	require.NoError(t, json.NewDecoder(res.Body).Decode(&made))
	require.NoError(t, res.Body.Close())
	require.Len(t, made.Layers, 2, "one of each key")

	var sent atomic.Int64
	u, err := m.client(t).Uploader(m.ref(t, "vm/a:1"), transport.Reference{}, &sent, "")
	require.NoError(t, err)
	require.NoError(t, u.Manifest(t.Context(), tag, string(made.MediaType), []byte("garbage")))
	require.NoError(t, os.WriteFile(file, make([]byte, 64<<10), 0o644))
	_, err = push("2", first)
	require.ErrorContains(t, err, "the signatures of "+digest)
	require.ErrorContains(t, pull("2", firstFile), "does not exist")
}
