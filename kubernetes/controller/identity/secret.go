package identity

import (
	"crypto/rand"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// The keys that kubevirt.io:disk reads, and the type, are those of Kubernetes' own iSCSI volumes.
const (
	keyUser     = "node.session.auth.username"
	keyPassword = "node.session.auth.password"
	typeCHAP    = corev1.SecretType("kubernetes.io/iscsi-chap")

	// user is the CHAP user of every identity. The password is the identity's own.
	user = "vm"
)

// secret is a new CHAP credential for an identity. It cannot be changed, so that a disk that runs
// and a machine that logs in later have the same one.
func secret(id *v1alpha1.VMIdentity) *corev1.Secret {
	immutable := true
	return &corev1.Secret{
		ObjectMeta: objectMeta(id, v1alpha1.SecretName(id.Name)),
		Type:       typeCHAP,
		Immutable:  &immutable,
		StringData: map[string]string{keyUser: user, keyPassword: rand.Text()},
	}
}
