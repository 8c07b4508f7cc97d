package integration

import (
	"crypto/tls"
	"crypto/x509"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool/certtest"
)

// makeCertificate makes the certificate of a server on this machine, which has signed itself.
func makeCertificate(t *testing.T, cert, key string) tls.Certificate {
	t.Helper()
	require.NoError(t, certtest.Authority(cert, key, func(c *x509.Certificate) {
		c.DNSNames = append(c.DNSNames, nameBehindProxy)
	}))
	pair, err := tls.LoadX509KeyPair(cert, key)
	require.NoError(t, err)
	return pair
}

// makeClientCertificate makes a certificate that server.crt, which makeCertificate has made in the
// same directory, has signed.
func makeClientCertificate(t *testing.T, dir, name string) (cert, key string) {
	t.Helper()
	file := func(name string) string { return filepath.Join(dir, name) }
	cert, key = file(name+".crt"), file(name+".key")
	require.NoError(t, certtest.Sign(file("server.crt"), file("server.key"), cert, key,
		certtest.Client(name)))
	return cert, key
}
