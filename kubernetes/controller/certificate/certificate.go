// Package certificate makes certificates by an authority that is forgotten once it has signed them,
// so no key can sign others.
package certificate

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"time"
)

// backdate allows for clocks that differ.
const backdate = time.Hour

// Authority signs certificates. All of them are valid as long as its own.
type Authority struct {
	certificate *x509.Certificate
	signed      []byte
	key         *ecdsa.PrivateKey
}

// New makes an authority.
func New(name string, now, until time.Time) (*Authority, error) {
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-backdate),
		NotAfter:              until,
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(signed)
	return &Authority{certificate, signed, key}, err
}

// PEM is the certificate of the authority.
func (a *Authority) PEM() []byte { return Encode("CERTIFICATE", a.signed) }

// Issue makes a certificate for DNS names, and its key.
func (a *Authority) Issue(usage x509.ExtKeyUsage, subject string, names ...string) (
	certificate, key []byte, err error) {
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	signed, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject:     pkix.Name{CommonName: subject},
		DNSNames:    names,
		NotBefore:   a.certificate.NotBefore,
		NotAfter:    a.certificate.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, a.certificate, &own.PublicKey, a.key)
	if err != nil {
		return nil, nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(own)
	return Encode("CERTIFICATE", signed), Encode("PRIVATE KEY", private), err
}

// Encode is a block of PEM.
func Encode(kind string, data []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
}
