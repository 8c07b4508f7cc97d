package webhook

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/controller/certificate"
)

// A certificate is valid for lifetime. A new one is made when less than renew of it is left.
const (
	lifetime = 90 * 24 * time.Hour
	renew    = 30 * 24 * time.Hour
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
	authority, err := certificate.New("kubevirt-disk-webhook", now, now.Add(lifetime))
	if err != nil {
		return nil, err
	}
	leaf, key, err := authority.Issue(x509.ExtKeyUsageServerAuth, names[0], names...)
	if err != nil {
		return nil, err
	}
	bundle := authority.PEM()
	// The first of the previous authorities is the one in use.
	if block, _ := pem.Decode(before); block != nil {
		if old, err := x509.ParseCertificate(block.Bytes); err == nil && now.Before(old.NotAfter) {
			bundle = append(bundle, certificate.Encode("CERTIFICATE", block.Bytes)...)
		}
	}
	return map[string][]byte{
		corev1.TLSCertKey:       leaf,
		corev1.TLSPrivateKeyKey: key,
		keyAuthority:            bundle,
	}, nil
}

// read checks the content of a Secret. The error says why a new certificate is needed.
func read(data map[string][]byte, names []string, now time.Time) (*pair, error) {
	shown, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data[keyAuthority]) {
		return nil, fmt.Errorf("%s has no certificate", keyAuthority)
	}
	for _, name := range names {
		if _, err := shown.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name,
			CurrentTime: now}); err != nil {
			return nil, err
		}
	}
	if shown.Leaf.NotAfter.Sub(now) < renew {
		return nil, errors.New("it ends soon")
	}
	return &pair{certificate: &shown, bundle: data[keyAuthority]}, nil
}
