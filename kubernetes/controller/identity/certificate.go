package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"time"
)

// authority signs certificates, which are valid as long as its own. It is forgotten once it has
// signed them, so no key can sign others.
type authority struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

// years is how long the certificates of an identity are valid. As its password, they end with it.
const years = 100

// newAuthority makes an authority. The hour before now allows for clocks that differ.
func newAuthority(name string, now time.Time) (authority, error) {
	signed, key, err := authority{}.sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.AddDate(years, 0, 0),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	})
	return authority{signed, key}, err
}

// issue makes a certificate for a DNS name, and its key, in PEM.
func (a authority) issue(usage x509.ExtKeyUsage, name string) (certificate, key []byte, err error) {
	signed, own, err := a.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "kubevirt-disk"},
		DNSNames:    []string{name},
		NotBefore:   a.NotBefore,
		NotAfter:    a.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
	})
	if err != nil {
		return nil, nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(own)
	return inPEM("CERTIFICATE", signed.Raw), inPEM("PRIVATE KEY", private), err
}

// sign makes a certificate with a key of its own. The zero authority lets it sign itself.
func (a authority) sign(template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if a.key == nil {
		a = authority{template, key}
	}
	data, err := x509.CreateCertificate(rand.Reader, template, a.Certificate, &key.PublicKey, a.key)
	if err != nil {
		return nil, nil, err
	}
	certificate, err := x509.ParseCertificate(data)
	return certificate, key, err
}

func inPEM(kind string, data []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
}
