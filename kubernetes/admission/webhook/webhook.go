package webhook

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"

	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	review "sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// The paths of the webhooks.
const (
	pathMutate   = "/mutate-pods"
	pathValidate = "/validate-pods"
)

// Options are the settings of the webhook.
type Options struct {
	// Server is the image of kubevirt-disk that serves the disks in pods.
	Server string
	// Namespaces are those that the controller works in; none: all. In others, a pod that asks for
	// a disk is refused, because its gate would never be removed.
	Namespaces []string
	// Listen is the address of the webhook, such as ":9443".
	Listen string
	// Certificate is the directory with tls.crt and tls.key of the webhook. They are read again
	// when they change.
	Certificate string
}

// Check returns the errors in the options, in words for the person who set them.
func (o Options) Check() error {
	_, _, err := o.listen()
	switch {
	case err != nil:
		return fmt.Errorf("webhook-listen: %q is not an address with a port: write it as :9443",
			o.Listen)
	case o.Certificate == "":
		return errors.New("webhook-certificate: it is missing, and the API server knows the " +
			"webhook by it: name the directory with tls.crt and tls.key")
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

// Setup adds the webhook to a manager. Every replica answers, not only the leader. Check must
// have returned nil before.
func Setup(mgr manager.Manager, o Options) error {
	host, port, err := o.listen()
	if err != nil {
		return err
	}
	server := webhook.NewServer(webhook.Options{Host: host, Port: port, CertDir: o.Certificate,
		TLSOpts: []func(*tls.Config){func(c *tls.Config) { c.MinVersion = tls.VersionTLS13 }}})
	answer := &handler{reader: mgr.GetAPIReader(), server: o.Server, namespaces: o.Namespaces}
	server.Register(pathMutate, &webhook.Admission{Handler: review.HandlerFunc(answer.mutate)})
	server.Register(pathValidate, &webhook.Admission{Handler: review.HandlerFunc(answer.validate)})
	return errors.Join(mgr.Add(server), mgr.AddReadyzCheck("webhook", server.StartedChecker()))
}
