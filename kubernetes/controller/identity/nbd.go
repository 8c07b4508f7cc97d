package identity

import (
	"context"
	"crypto/x509"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/certificate"
)

// years is how long the certificates of an identity are valid. As its password, they end with it.
const years = 100

// nbdSecret is a new secret with the certificates for NBD of an identity that is served at a host:
// that of the server, and one for all clients, which by it are one name. It is immutable, as the
// CHAP credential is.
func nbdSecret(id *v1alpha1.VMIdentity, host string) (*corev1.Secret, error) {
	now := time.Now()
	authority, err := certificate.New("kubevirt-disk "+string(id.UID), now,
		now.AddDate(years, 0, 0))
	if err != nil {
		return nil, err
	}
	cert, key, err := authority.Issue(x509.ExtKeyUsageServerAuth, "kubevirt-disk", host)
	if err != nil {
		return nil, err
	}
	clientCert, clientKey, err := authority.Issue(x509.ExtKeyUsageClientAuth, "kubevirt-disk",
		id.Name+"."+id.Namespace)
	return &corev1.Secret{
		ObjectMeta: objectMeta(id, v1alpha1.NBDSecretName(id.Name)),
		Type:       corev1.SecretTypeTLS,
		Immutable:  new(true),
		Data: map[string][]byte{
			corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key,
			v1alpha1.KeyAuthority:  authority.PEM(),
			v1alpha1.KeyClientCert: clientCert, v1alpha1.KeyClientKey: clientKey,
		},
	}, err
}

// NewNBDSecret makes the secret with the certificates for NBD of an identity that nobody was served
// by yet. One that is there was made by a controller that was killed since, and is replaced; that
// of somebody else is an error.
func NewNBDSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity,
	host string) error {
	s, err := nbdSecret(id, host)
	if err != nil {
		return err
	}
	err = c.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace,
		Name: s.Name}})
	// The API server does not let us delete the secret of somebody else.
	if client.IgnoreNotFound(err) != nil && !apierrors.IsForbidden(err) {
		return err
	}
	return c.Create(ctx, s, client.FieldOwner(v1alpha1.FieldManager))
}

// MakeNBDSecret makes that secret again if somebody has deleted it, as MakeSecret does.
func MakeNBDSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity, host string,
	options ...client.CreateOption) (bool, error) {
	s, err := nbdSecret(id, host)
	if err != nil {
		return false, err
	}
	return makeSecret(ctx, c, s, options)
}
