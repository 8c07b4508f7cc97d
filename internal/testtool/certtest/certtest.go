// Package certtest makes certificates for tests and benchmarks, in PEM files. Tests of packages
// that speak TLS use it, and so do those that start daemons.
package certtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Change changes what a certificate says before it is signed.
type Change func(*x509.Certificate)

// Authority writes a certificate that has signed itself, and its key. It can sign others, and can
// be that of a server on this machine.
func Authority(cert, key string, change ...Change) error {
	return write(cert, key, nil, nil, change)
}

// Sign writes a certificate, by an authority, and its key. It can be that of a server on this
// machine, and that of a client.
func Sign(authority, authorityKey, cert, key string, change ...Change) error {
	parent, err := read(authority)
	if err != nil {
		return err
	}
	der, err := block(authorityKey)
	if err != nil {
		return err
	}
	signer, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return err
	}
	return write(cert, key, parent, signer, change)
}

// Pool returns the certificate of a file as the only one to trust.
func Pool(cert string) (*x509.CertPool, error) {
	c, err := read(cert)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AddCert(c)
	return pool, nil
}

func read(cert string) (*x509.Certificate, error) {
	der, err := block(cert)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func block(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if b, _ := pem.Decode(text); b != nil {
		return b.Bytes, nil
	}
	return nil, fmt.Errorf("%s: no PEM block", path)
}

// write signs by parent. If that is nil, the certificate is an authority that signs itself. The
// common name is that of the file.
func write(cert, key string, parent *x509.Certificate, signer any, change []Change) error {
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	c.Subject.CommonName = filepath.Base(cert)
	if parent == nil {
		parent, signer = c, own
		c.IsCA, c.ExtKeyUsage = true, nil
		c.KeyUsage |= x509.KeyUsageCertSign
	}
	for _, f := range change {
		f(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, own.Public(), signer)
	if err != nil {
		return err
	}
	if err := writePEM(cert, "CERTIFICATE", der); err != nil {
		return err
	}
	if der, err = x509.MarshalPKCS8PrivateKey(own); err != nil {
		return err
	}
	return writePEM(key, "PRIVATE KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// Client makes it the certificate of a client that has this name, and no other one.
func Client(name string) Change {
	return func(c *x509.Certificate) {
		c.Subject.CommonName = name
		c.DNSNames, c.IPAddresses = nil, nil
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
}
