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

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
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
