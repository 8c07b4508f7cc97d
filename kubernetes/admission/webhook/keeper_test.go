package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// store is an API server with one Secret and the two configurations.
type store struct {
	client.Reader
	client.Writer
	secret     *corev1.Secret
	mutating   admissionregistrationv1.MutatingWebhookConfiguration
	validating admissionregistrationv1.ValidatingWebhookConfiguration
	// before runs before each write: another replica.
	before func()
	writes int
}

func (s *store) Get(_ context.Context, _ client.ObjectKey, o client.Object,
	_ ...client.GetOption) error {
	switch o := o.(type) {
	case *corev1.Secret:
		if s.secret == nil {
			return apierrors.NewNotFound(schema.GroupResource{}, "")
		}
		s.secret.DeepCopyInto(o)
	case *admissionregistrationv1.MutatingWebhookConfiguration:
		s.mutating.DeepCopyInto(o)
	case *admissionregistrationv1.ValidatingWebhookConfiguration:
		s.validating.DeepCopyInto(o)
	}
	return nil
}

func (s *store) write() {
	s.writes++
	if before := s.before; before != nil {
		s.before = nil
		before()
	}
}

func (s *store) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	s.write()
	if s.secret != nil {
		return apierrors.NewAlreadyExists(schema.GroupResource{}, "")
	}
	s.secret = o.(*corev1.Secret).DeepCopy()
	s.secret.ResourceVersion = "1"
	return nil
}

func (s *store) Update(_ context.Context, o client.Object, _ ...client.UpdateOption) error {
	s.write()
	switch o := o.(type) {
	case *corev1.Secret:
		if o.ResourceVersion != s.secret.ResourceVersion {
			return apierrors.NewConflict(schema.GroupResource{}, "", nil)
		}
		s.secret = o.DeepCopy()
		s.secret.ResourceVersion += "1"
	case *admissionregistrationv1.MutatingWebhookConfiguration:
		s.mutating = *o.DeepCopy()
	case *admissionregistrationv1.ValidatingWebhookConfiguration:
		s.validating = *o.DeepCopy()
	}
	return nil
}

const service = "disks.system.svc"

func replica(s *store, now *time.Time) *keeper {
	return &keeper{reader: s, writer: s, log: logr.Discard(), names: []string{service},
		secret: client.ObjectKey{Namespace: "system", Name: "certificate"}, configuration: "pods",
		now: func() time.Time { return *now }}
}

func newStore() *store {
	return &store{
		mutating: admissionregistrationv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "pods"},
			Webhooks:   make([]admissionregistrationv1.MutatingWebhook, 1)},
		validating: admissionregistrationv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "pods"},
			Webhooks:   make([]admissionregistrationv1.ValidatingWebhook, 1)},
	}
}

// trusted reports whether the API server, with the bundle of a configuration, trusts a replica.
func (s *store) trusted(t *testing.T, k *keeper, now time.Time) error {
	t.Helper()
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(s.mutating.Webhooks[0].ClientConfig.CABundle))
	require.Equal(t, s.mutating.Webhooks[0].ClientConfig, s.validating.Webhooks[0].ClientConfig)
	near, far := net.Pipe()
	defer near.Close()
	go func() {
		defer far.Close()
		_ = tls.Server(far, &tls.Config{GetCertificate: k.certificate}).Handshake()
	}()
	c := tls.Client(near, &tls.Config{RootCAs: pool, ServerName: service,
		Time: func() time.Time { return now }})
	return c.Handshake()
}

func (k *keeper) mustSync(t *testing.T) (changed bool) {
	t.Helper()
	changed, err := k.sync(t.Context())
	require.NoError(t, err)
	return changed
}

// Whatever two replicas do, the API server trusts both.
func TestRotation(t *testing.T) {
	now := time.Now()
	s := newStore()
	one, two := replica(s, &now), replica(s, &now)
	_, err := one.certificate(nil)
	require.Error(t, err)
	check := func() {
		t.Helper()
		require.NoError(t, s.trusted(t, one, now))
		require.NoError(t, s.trusted(t, two, now))
	}
	// Both begin at once: the Secret of the first one counts.
	s.before = func() { two.mustSync(t) }
	one.mustSync(t)
	check()
	require.False(t, one.mustSync(t))
	require.Equal(t, one.shown.Load().Certificate, two.shown.Load().Certificate)

	writes := s.writes
	for range 3 {
		one.mustSync(t)
	}
	require.Equal(t, writes, s.writes, "nothing changed, so nothing is written")

	for range 3 {
		first := one.shown.Load()
		now = now.Add(lifetime - renew + time.Minute)
		// Both find that a new one is needed, and one of them is late.
		s.before = func() { require.True(t, two.mustSync(t)) }
		one.mustSync(t)
		check()
		two.mustSync(t)
		check()
		one.mustSync(t)
		check()
		require.NotEqual(t, first.Certificate, one.shown.Load().Certificate)
		require.Equal(t, one.shown.Load().Certificate, two.shown.Load().Certificate)
	}
}

// Whatever somebody breaks is repaired.
func TestRepair(t *testing.T) {
	now := time.Now()
	for what, spoil := range map[string]func(*store){
		"the Secret is gone":            func(s *store) { s.secret = nil },
		"the Secret is empty":           func(s *store) { s.secret.Data = nil },
		"the key is another one":        func(s *store) { s.secret.Data["tls.key"] = []byte("x") },
		"no authority":                  func(s *store) { s.secret.Data["ca.crt"] = nil },
		"a chart was installed anew":    func(s *store) { *s = *withSecret(newStore(), s.secret) },
		"everything was ended too long": func(*store) { now = now.Add(2 * lifetime) },
	} {
		s := newStore()
		k := replica(s, &now)
		k.mustSync(t)
		spoil(s)
		k.mustSync(t)
		k.mustSync(t)
		require.NoError(t, s.trusted(t, k, now), what)
	}
}

func withSecret(s *store, secret *corev1.Secret) *store {
	s.secret = secret
	return s
}
