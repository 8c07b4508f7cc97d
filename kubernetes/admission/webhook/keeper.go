package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// keeper has the certificate that this replica shows. It maintains the Secret that the certificate
// comes from, and the configurations that name its authority.
type keeper struct {
	reader        client.Reader
	writer        client.Writer
	log           logr.Logger
	secret        client.ObjectKey
	configuration string
	names         []string
	now           func() time.Time

	shown atomic.Pointer[tls.Certificate]
}

func (k *keeper) certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if c := k.shown.Load(); c != nil {
		return c, nil
	}
	return nil, errors.New("the webhook has no certificate yet")
}

// sync makes the Secret, the configurations and the certificate in use agree. It reports whether it
// changed a configuration. Then the API server may not know the authority yet, and sync must be
// called again to show the new certificate.
func (k *keeper) sync(ctx context.Context) (changed bool, err error) {
	p, err := k.load(ctx)
	if err != nil {
		return false, fmt.Errorf("secret %s: %w", k.secret, err)
	}
	changed, err = k.publish(ctx, p.bundle)
	if err != nil {
		return changed, err
	}
	if !changed || k.shown.Load() == nil {
		k.shown.Store(p.certificate)
	}
	return changed, nil
}

// load reads the certificate from the Secret. If there is no usable one, it makes one. If another
// replica does so at the same time, that one's is used.
func (k *keeper) load(ctx context.Context) (*pair, error) {
	secret := &corev1.Secret{}
	err := k.reader.Get(ctx, k.secret, secret)
	missing := apierrors.IsNotFound(err)
	if err != nil && !missing {
		return nil, err
	}
	p, wrong := read(secret.Data, k.names, k.now())
	if wrong == nil {
		return p, nil
	}
	data, err := generate(k.names, k.now(), secret.Data[keyAuthority])
	if err != nil {
		return nil, err
	}
	if missing {
		secret = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: k.secret.Namespace, Name: k.secret.Name},
			Type:       corev1.SecretTypeTLS, Data: data}
		err = k.writer.Create(ctx, secret)
	} else {
		k.log.Info("making another certificate", "reason", wrong.Error())
		secret.Data = data
		err = k.writer.Update(ctx, secret)
	}
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		if err := k.reader.Get(ctx, k.secret, secret); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, err
	}
	return read(secret.Data, k.names, k.now())
}

// publish writes the authorities into the configurations.
func (k *keeper) publish(ctx context.Context, bundle []byte) (changed bool, err error) {
	for _, object := range []client.Object{
		&admissionregistrationv1.ValidatingWebhookConfiguration{},
		&admissionregistrationv1.MutatingWebhookConfiguration{},
	} {
		if err := k.reader.Get(ctx, client.ObjectKey{Name: k.configuration}, object); err != nil {
			return changed, fmt.Errorf("%T %s: %w", object, k.configuration, err)
		}
		differ := false
		set := func(c *admissionregistrationv1.WebhookClientConfig) {
			differ = differ || !bytes.Equal(c.CABundle, bundle)
			c.CABundle = bundle
		}
		switch o := object.(type) {
		case *admissionregistrationv1.MutatingWebhookConfiguration:
			for i := range o.Webhooks {
				set(&o.Webhooks[i].ClientConfig)
			}
		case *admissionregistrationv1.ValidatingWebhookConfiguration:
			for i := range o.Webhooks {
				set(&o.Webhooks[i].ClientConfig)
			}
		}
		if !differ {
			continue
		}
		if err := k.writer.Update(ctx, object); err != nil {
			return changed, fmt.Errorf("%T %s: %w", object, k.configuration, err)
		}
		changed = true
	}
	return changed, nil
}
