package identity

import (
	"crypto/tls"
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// TestNBDSecret: server and client know each other by certificates that are good for nothing else,
// and as long as the disk is, also if a clock is years behind that of the controller.
func TestNBDSecret(t *testing.T) {
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: "vms", Name: "fedora.1",
		UID: "u"}}
	const host = "vmid-fedora-1-01234567.vms.svc"
	s := testtool.Must(nbdSecret(id, host))(t)
	require.Equal(t, "vmnbd-fedora.1", s.Name)
	require.Equal(t, "fedora.1", s.Labels[v1alpha1.LabelIdentity])
	require.True(t, objects.Belongs(s, id))
	require.Empty(t, s.OwnerReferences)
	server, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	require.NoError(t, err)
	client, err := tls.X509KeyPair(s.Data[v1alpha1.KeyClientCert], s.Data[v1alpha1.KeyClientKey])
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(s.Data[v1alpha1.KeyAuthority]))
	good := func(c tls.Certificate, usage x509.ExtKeyUsage, name string) error {
		for _, years := range []int{-50, 0, 500} {
			if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name,
				KeyUsages:   []x509.ExtKeyUsage{usage},
				CurrentTime: time.Now().AddDate(years, 0, 0)}); err != nil {
				return err
			}
		}
		return nil
	}
	require.NoError(t, good(server, x509.ExtKeyUsageServerAuth, host))
	require.NoError(t, good(client, x509.ExtKeyUsageClientAuth, "fedora.1.vms"))
	require.Error(t, good(server, x509.ExtKeyUsageServerAuth, "vmid-other.vms.svc"))
	require.Error(t, good(server, x509.ExtKeyUsageClientAuth, ""), "it is no client")
	require.Error(t, good(client, x509.ExtKeyUsageServerAuth, ""), "it is no server")
	require.False(t, client.Leaf.IsCA)
	require.False(t, server.Leaf.IsCA)

	other := testtool.Must(nbdSecret(id, host))(t)
	client = testtool.Must(tls.X509KeyPair(other.Data[v1alpha1.KeyClientCert],
		other.Data[v1alpha1.KeyClientKey]))(t)
	require.Error(t, good(client, x509.ExtKeyUsageClientAuth, ""), "each secret has its own")
}
