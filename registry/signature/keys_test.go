package signature

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"testing"

	"github.com/secure-systems-lab/go-securesystemslib/encrypted"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
)

func blockOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// TestPrivateKeys: each kind of file signs, and its public part verifies that.
func TestPrivateKeys(t *testing.T) {
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	factors, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	pkcs8 := func(key any) []byte {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		require.NoError(t, err)
		return der
	}
	sec1, err := x509.MarshalECPrivateKey(curve)
	require.NoError(t, err)
	secret, err := encrypted.Encrypt(pkcs8(curve), []byte("a password"))
	require.NoError(t, err)
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
		key, err := ParsePrivateKey(c.text, []byte("a password"))
		require.NoError(t, err, name)
		require.Equal(t, registrytest.Fingerprint(t, c.key), key.Fingerprint)
		sig, err := key.sign([]byte("message"))
		require.NoError(t, err, name)
		text, err := os.ReadFile(registrytest.PublicKey(t, c.key))
		require.NoError(t, err)
		keys, err := ParseKeys(text)
		require.NoError(t, err)
		require.True(t, keys[0].signed([]byte("message"), sig), name)
		require.False(t, keys[0].signed([]byte("another"), sig), name)
	}
	_, err = ParsePrivateKey(blockOf(pemSigstore, secret), []byte("another"))
	require.ErrorContains(t, err, "the password is wrong")
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	require.NoError(t, err)
	_, err = ParsePrivateKey(blockOf(pemPrivate, pkcs8(small)), nil)
	require.ErrorContains(t, err, "1024 bits")
	large, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	require.NoError(t, err)
	_, err = ParsePrivateKey(blockOf(pemPrivate, pkcs8(large)), nil)
	require.ErrorContains(t, err, "use P-256")
	_, err = ParsePrivateKey([]byte("garbage"), nil)
	require.ErrorContains(t, err, "no private key in PEM")
	_, err = ParsePrivateKey(blockOf(pemPublic, nil), nil)
	require.ErrorContains(t, err, `it has a "PUBLIC KEY"`)
}
