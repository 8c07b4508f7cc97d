package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// The keys that kubevirt.io:disk reads, and the type. They are those of Kubernetes' own iSCSI
// volumes.
const (
	keyUser     = "node.session.auth.username"
	keyPassword = "node.session.auth.password"
	// The kubelet also uses these, for the discovery of the target.
	keyFindUser     = "discovery.sendtargets.auth.username"
	keyFindPassword = "discovery.sendtargets.auth.password"

	typeCHAP = corev1.SecretType("kubernetes.io/iscsi-chap")

	// user is the CHAP user of every identity. The password is the identity's own.
	user = "vm"
)

// secret is a new CHAP credential for an identity. It is immutable, so that a running disk and a
// machine that logs in later use the same one.
func secret(id *v1alpha1.VMIdentity) *corev1.Secret {
	immutable := true
	password := rand.Text()
	return &corev1.Secret{
		ObjectMeta: objects.MetaOf(id, v1alpha1.SecretName(id.Name)),
		Type:       typeCHAP,
		Immutable:  &immutable,
		StringData: map[string]string{keyUser: user, keyPassword: password,
			keyFindUser: user, keyFindPassword: password},
	}
}

// MakeSecret makes the secret of an identity again if it was deleted, and returns whether it did.
// The password is new, so no process may still use the old one.
//
// A namespace with a full quota refuses an existing secret just like a missing one. So a refusal of
// the API server counts as an existing secret.
func MakeSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity) (bool, error) {
	err := c.Create(ctx, secret(id), client.FieldOwner(v1alpha1.FieldManager))
	if apierrors.IsAlreadyExists(err) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		return false, nil
	}
	return err == nil, err
}

// deleteSecret deletes a secret of an identity if it exists. The API server does not let us delete
// those of other owners.
func deleteSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity,
	name string) error {
	err := c.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace,
		Name: name}})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsForbidden(err) {
		return fmt.Errorf("secret %s: %w", name, err)
	}
	return nil
}

// SecretMissing is the message about a secret that MakeSecret has made again.
func SecretMissing(id *v1alpha1.VMIdentity) string {
	return "the secret " + v1alpha1.SecretName(id.Name) + " was deleted: it was made again, with " +
		"another password"
}

// certificate makes a certificate for a DNS name, and its key, in PEM. Its peers have the
// certificate itself, so it is signed by its own key, and no key can sign others. It has no limit
// of time, like the password of its identity, so that wrong clocks do not matter.
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
