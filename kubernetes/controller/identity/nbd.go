package identity

import (
	"context"
	"crypto/x509"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// nbdSecret is a new secret with the certificates for NBD of an identity that is served at a host:
// one for the server, and one for all clients, which gives them all one name. It is immutable, like
// the CHAP credential.
func nbdSecret(id *v1alpha1.VMIdentity, host string) (*corev1.Secret, error) {
	cert, key, err := certificate(x509.ExtKeyUsageServerAuth, host)
	if err != nil {
		return nil, err
	}
	clientCert, clientKey, err := certificate(x509.ExtKeyUsageClientAuth, id.Name+"."+id.Namespace)
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

// MakeNBDSecret makes the secret with the certificates for NBD of an identity, unless it exists:
// servers and machines may use it, even if the cache or the status do not show it yet. A secret of
// another owner is an error. The API server does not let us delete such a secret, so a dry run of a
// deletion detects it. The dry run follows any refusal, because a namespace with a full quota
// refuses an existing secret just like a missing one.
func MakeNBDSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity,
	host string) error {
	s, err := nbdSecret(id, host)
	if err != nil {
		return err
	}
	err = c.Create(ctx, s, client.FieldOwner(v1alpha1.FieldManager))
	refused := apierrors.IsAlreadyExists(err) || apierrors.IsForbidden(err)
	if refused && c.Delete(ctx, s, client.DryRunAll) == nil {
		return nil
	}
	return err
}

// DeleteNBDSecret deletes the secret of MakeNBDSecret if it exists.
func DeleteNBDSecret(ctx context.Context, c client.Client, id *v1alpha1.VMIdentity) error {
	return deleteSecret(ctx, c, id, v1alpha1.NBDSecretName(id.Name))
}
