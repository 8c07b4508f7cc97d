package webhook

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// A certificate is valid for lifetime. A new one is made when less than renew of it is left.
const (
	lifetime = 90 * 24 * time.Hour
	renew    = 30 * 24 * time.Hour
	// backdate allows for clocks that differ.
	backdate = time.Hour
)

// keyAuthority is the key in the Secret for the authorities: the certificate's, and the previous
// one while it is in use.
const keyAuthority = "ca.crt"

// pair is a certificate, its key, and the authorities that may have signed replicas' certificates.
type pair struct {
	certificate *tls.Certificate
	bundle      []byte
}

// generate makes a certificate for names, and an authority that signs nothing else. The bundle
// keeps the previous authorities.
func generate(names []string, now time.Time, before []byte) (map[string][]byte, error) {
	authority := &x509.Certificate{
		SerialNumber:          big.NewInt(now.UnixNano()),
		Subject:               pkix.Name{CommonName: "kubevirt-disk-webhook"},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	signed, err := x509.CreateCertificate(rand.Reader, authority, authority,
		&authorityKey.PublicKey, authorityKey)
	if err != nil {
		return nil, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano() + 1),
		Subject:      pkix.Name{CommonName: names[0]},
		DNSNames:     names,
		NotBefore:    authority.NotBefore,
		NotAfter:     authority.NotAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.CreateCertificate(rand.Reader, leaf, authority, &key.PublicKey,
		authorityKey)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	bundle := encode("CERTIFICATE", signed)
	// The first of the previous authorities is the one in use.
	if block, _ := pem.Decode(before); block != nil {
		if old, err := x509.ParseCertificate(block.Bytes); err == nil && now.Before(old.NotAfter) {
			bundle = append(bundle, encode("CERTIFICATE", block.Bytes)...)
		}
	}
	return map[string][]byte{
		corev1.TLSCertKey:       encode("CERTIFICATE", certificate),
		corev1.TLSPrivateKeyKey: encode("PRIVATE KEY", private),
		keyAuthority:            bundle,
	}, nil
}

func encode(kind string, data []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
}

// read checks the content of a Secret. The error says why a new certificate is needed.
func read(data map[string][]byte, names []string, now time.Time) (*pair, error) {
	certificate, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data[keyAuthority]) {
		return nil, fmt.Errorf("%s has no certificate", keyAuthority)
	}
	for _, name := range names {
		if _, err := certificate.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name,
			CurrentTime: now}); err != nil {
			return nil, err
		}
	}
	if certificate.Leaf.NotAfter.Sub(now) < renew {
		return nil, errors.New("it ends soon")
	}
	return &pair{certificate: &certificate, bundle: data[keyAuthority]}, nil
}
