package signature

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/secure-systems-lab/go-securesystemslib/encrypted"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

func blockOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// TestPrivateKeys: each kind of file signs, and its public part verifies that.
func TestPrivateKeys(t *testing.T) {
	curve := testtool.Must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	factors := testtool.Must(rsa.GenerateKey(rand.Reader, 2048))(t)
	_, edwards := testtool.Must2(ed25519.GenerateKey(rand.Reader))(t)
	pkcs8 := func(key any) []byte {
		return testtool.Must(x509.MarshalPKCS8PrivateKey(key))(t)
	}
	sec1 := testtool.Must(x509.MarshalECPrivateKey(curve))(t)
	secret := testtool.Must(encrypted.Encrypt(pkcs8(curve), []byte("a password")))(t)
	for name, c := range map[string]struct {
		key  crypto.Signer
		text []byte
	}{
		"cosign":         {curve, blockOf(pemSigstore, secret)},
		"earlier cosign": {curve, blockOf(pemCosign, secret)},
		"PKCS #8":        {curve, blockOf(pemPrivate, pkcs8(curve))},
		"SEC 1": {curve, append(blockOf("EC PARAMETERS", []byte("x")),
			blockOf(pemPrivateEC, sec1)...)},
		"PKCS #1": {factors, blockOf(pemPrivateRSA, x509.MarshalPKCS1PrivateKey(factors))},
		"RSA":     {factors, blockOf(pemPrivate, pkcs8(factors))},
		"Ed25519": {edwards, blockOf(pemPrivate, pkcs8(edwards))},
	} {
		key := testtool.Must(ParsePrivateKey(c.text, []byte("a password")))(t, name)
		require.Equal(t, registrytest.Fingerprint(t, c.key), key.Fingerprint)
		sig := testtool.Must(key.sign([]byte("message")))(t, name)
		text := testtool.Must(os.ReadFile(registrytest.PublicKey(t, c.key)))(t)
		keys := testtool.Must(ParseKeys(text))(t)
		require.True(t, keys[0].signed([]byte("message"), sig), name)
		require.False(t, keys[0].signed([]byte("another"), sig), name)
	}
	_, err := ParsePrivateKey(blockOf(pemSigstore, secret), []byte("another"))
	require.ErrorContains(t, err, "the password is wrong")
	small := testtool.Must(rsa.GenerateKey(rand.Reader, 1024))(t)
	_, err = ParsePrivateKey(blockOf(pemPrivate, pkcs8(small)), nil)
	require.ErrorContains(t, err, "1024 bits")
	large := testtool.Must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))(t)
	_, err = ParsePrivateKey(blockOf(pemPrivate, pkcs8(large)), nil)
	require.ErrorContains(t, err, "use P-256")
	_, err = ParsePrivateKey([]byte("garbage"), nil)
	require.ErrorContains(t, err, "no private key in PEM")
	_, err = ParsePrivateKey(blockOf(pemPublic, nil), nil)
	require.ErrorContains(t, err, `it has a "PUBLIC KEY"`)
}

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

// FuzzEvidence: whatever a registry sends as a signature is refused without a panic, unless it is
// one that a key has made of this content.
func FuzzEvidence(f *testing.F) {
	// The same one in each process of the fuzz test.
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	text := testtool.Must(os.ReadFile(registrytest.PublicKey(f, key)))(f)
	keys := testtool.Must(ParseKeys(text))(f)
	content := []byte("a manifest")
	digest := transport.DigestOf(content)
	good := registrytest.SimplePayload(digest)
	sig := registrytest.SignatureOf(f, key, good)
	f.Add(good, sig)
	f.Add(registrytest.Message(f, key, content), []byte(nil))
	f.Add(registrytest.Envelope(f, key, registrytest.Statement(digest, registrytest.SignPredicate),
		registrytest.ByKey), []byte(nil))
	f.Add(registrytest.Envelope(f, key, []byte("{}"), `{"certificate":{"rawBytes":"AAAA"}}`),
		[]byte(nil))
	other := []byte("another manifest")
	f.Fuzz(func(t *testing.T, text, sig []byte) {
		for _, e := range []evidence{{Format: FormatSimple, Payload: text, Signature: sig},
			{Format: FormatBundle, Bundle: text}} {
			// Nobody has signed the other content.
			if _, err := e.check(keys, other); err == nil {
				t.Fatalf("%s counts as a signature: %q", e.Format, text)
			}
			_, _ = e.check(keys, content)
		}
		_, _ = parseProof(text)
		_, _ = signaturesIn(text)
	})
}

// FuzzKeys reads keys and policies. People write them, and a typing error is no panic.
func FuzzKeys(f *testing.F) {
	_, file := registrytest.NewSigner(f)
	f.Add(testtool.Must(os.ReadFile(file))(f))
	f.Add([]byte("default: allow\nimages:\n- {prefix: a.b/c, action: deny}\n"))
	f.Add([]byte("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\neyJrZGYiOnt9fQ==\n" +
		"-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if keys, err := ParseKeys(text); err == nil {
			require.NotEmpty(t, keys)
		}
		_, _ = ParsePrivateKey(text, nil)
		_, _ = parsePolicy(text, t.TempDir())
	})
}
