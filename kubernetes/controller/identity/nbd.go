package identity

import (
	"context"
	"crypto/x509"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// nbdSecret is a new secret with the certificates for NBD of an identity that is served at a host:
// that of the server, and one for all clients, which by it are one name. It is immutable, as the
// CHAP credential is.
func nbdSecret(id *v1alpha1.VMIdentity, host string) (*corev1.Secret, error) {
	now := time.Now()
	cert, key, err := certificate(x509.ExtKeyUsageServerAuth, host, now)
	if err != nil {
		return nil, err
	}
	clientCert, clientKey, err := certificate(x509.ExtKeyUsageClientAuth,
		id.Name+"."+id.Namespace, now)
	return &corev1.Secret{
		ObjectMeta: objects.MetaOf(id, v1alpha1.NBDSecretName(id.Name)),
		Type:       corev1.SecretTypeTLS,
		Immutable:  new(true),
		Data: map[string][]byte{
			corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key,
			v1alpha1.KeyAuthority:  slices.Concat(cert, clientCert),
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
	if err := DeleteNBDSecret(ctx, c, id); err != nil {
		return err
	}
	return c.Create(ctx, s, client.FieldOwner(v1alpha1.FieldManager))
}

// DeleteNBDSecret deletes that secret, if it is there.
func DeleteNBDSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity) error {
	return deleteSecret(ctx, c, id, v1alpha1.NBDSecretName(id.Name))
}

// MakeNBDSecret makes that secret again if somebody has deleted it, as MakeSecret does.
func MakeNBDSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity,
	host string) error {
	s, err := nbdSecret(id, host)
	if err == nil {
		_, err = makeSecret(ctx, c, s)
	}
	return err
}
