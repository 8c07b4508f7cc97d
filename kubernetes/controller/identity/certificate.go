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

// certificate makes a certificate for a DNS name, and its key, in PEM. Whoever trusts it has the
// certificate itself, so it is signed by its own key, and no key can sign others. As the password
// of its identity, it is valid until that goes, whatever the clocks say that make and read it.
func certificate(usage x509.ExtKeyUsage, name string) (cert, key []byte, err error) {
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "kubevirt-disk"},
		DNSNames:    []string{name},
		NotBefore:   time.Unix(0, 0),
		NotAfter:    time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &own.PublicKey, own)
	if err != nil {
		return nil, nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(own)
	return inPEM("CERTIFICATE", signed), inPEM("PRIVATE KEY", private), err
}

func inPEM(kind string, data []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
}
