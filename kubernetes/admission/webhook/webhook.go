package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	review "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// The paths of the webhooks.
const (
	pathMutate   = "/mutate-pods"
	pathValidate = "/validate-pods"
)

// Options say where the webhook answers, and which objects it keeps.
type Options struct {
	// Server is the image of kubevirt-disk that serves the disks in pods.
	Server string
	// Namespaces are those that the controller works in; none: all. In others, a pod that asks for
	// a disk is refused, because nobody would take its gate away.
	Namespaces []string
	// Listen is the address of the webhook, as ":9443".
	Listen string
	// Namespace and Service are where the API server finds the webhook. The certificate is for
	// SERVICE.NAMESPACE.svc.
	Namespace, Service string
}

// Check returns what is wrong with the options, in words for the person who set them.
func (o Options) Check() error {
	_, _, err := o.listen()
	switch {
	case err != nil:
		return fmt.Errorf("webhook-listen: %q is not an address with a port: write it as :9443",
			o.Listen)
	case o.Namespace == "" || o.Service == "":
		return errors.New("webhook-service: the webhook needs the Service that it is found by: " +
			"write it as NAMESPACE/NAME")
	case o.Server == "":
		return errors.New("server-image: it is missing, and the webhook gives it to pods")
	}
	return nil
}

func (o Options) listen() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return "", 0, err
	}
	number, err := strconv.ParseUint(text, 10, 16)
	if err == nil && number == 0 {
		err = errors.New("no port")
	}
	return host, int(number), err
}

// Setup adds the webhook to a manager. Every replica answers, not only the leader.
func Setup(mgr manager.Manager, o Options) error {
	if err := o.Check(); err != nil {
		return err
	}
	host, port, err := o.listen()
	if err != nil {
		return err
	}
	keep := &keeper{
		reader: mgr.GetAPIReader(), writer: mgr.GetClient(),
		log:           mgr.GetLogger().WithName("webhook"),
		secret:        client.ObjectKey{Namespace: o.Namespace, Name: "kubevirt-disk-webhook"},
		configuration: "pods." + v1alpha1.Group,
		names: []string{o.Service + "." + o.Namespace + ".svc",
			o.Service + "." + o.Namespace + ".svc.cluster.local"},
		now: time.Now,
	}
	server := webhook.NewServer(webhook.Options{Host: host, Port: port,
		TLSOpts: []func(*tls.Config){func(c *tls.Config) {
			c.MinVersion = tls.VersionTLS13
			c.GetCertificate = keep.certificate
		}}})
	answer := &handler{reader: mgr.GetAPIReader(), server: o.Server,
		namespaces: o.Namespaces}
	server.Register(pathMutate, &webhook.Admission{Handler: review.HandlerFunc(answer.mutate)})
	server.Register(pathValidate,
		&webhook.Admission{Handler: review.HandlerFunc(answer.validate)})
	return errors.Join(mgr.Add(keep), mgr.Add(server),
		mgr.AddReadyzCheck("webhook", func(r *http.Request) error {
			if _, err := keep.certificate(nil); err != nil {
				return err
			}
			return server.StartedChecker()(r)
		}))
}

var _ manager.LeaderElectionRunnable = (*keeper)(nil)

// NeedLeaderElection says that every replica keeps the certificate that it shows.
func (k *keeper) NeedLeaderElection() bool { return false }

// The time between two looks at the certificate and the configurations, and the shorter one after a
// failure or a change.
const (
	every = 30 * time.Second // a configuration that was made anew has no authority until then
	again = 10 * time.Second
)

// Start keeps the certificate until the context ends.
func (k *keeper) Start(ctx context.Context) error {
	ctx = ctrl.LoggerInto(ctx, k.log)
	for {
		wait := every
		changed, err := k.sync(ctx)
		if err != nil && ctx.Err() == nil {
			k.log.Error(err, "the certificate of the webhook could not be kept: trying again")
		}
		if err != nil || changed {
			wait = again
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}
