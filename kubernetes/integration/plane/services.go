package plane

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/admission/webhook"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// services leads all connections of the API server to Services to one address of this machine:
// there is no network of Services, and the controller with its webhook is a process of a test.
type services struct {
	listener net.Listener

	mu      sync.Mutex
	address string                // guarded by mu; "": nobody is there
	open    map[net.Conn]struct{} // guarded by mu; connections to the address
}

// lead leads all connections to another address. Those that are open end.
func (s *services) lead(address string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.open {
		conn.Close()
	}
	s.address, s.open = address, map[net.Conn]struct{}{}
}

// dial connects to the address.
func (s *services) dial() (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	conn, err := net.Dial("tcp", s.address)
	if err == nil {
		s.open[conn] = struct{}{}
	}
	return conn, err
}

// Webhook lets the API server find the webhook at an address of this machine, and waits until it
// answers about pods.
func (p *Plane) Webhook(t testing.TB, address string) {
	t.Helper()
	p.services.lead(address)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault,
		Name: "asked", Annotations: map[string]string{v1alpha1.AnnotationSet: "none"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "vm", Image: "vm"}}}}
	var last error
	err := p.until("the webhook answers", func() bool {
		last = p.Client.Create(context.Background(), pod.DeepCopy(), client.DryRunAll)
		return last != nil && strings.Contains(last.Error(), "denied the request: ")
	})
	require.NoError(t, err, last)
}

// NoWebhook is an outage of the webhook.
func (p *Plane) NoWebhook() { p.services.lead("") }

// ServeWebhook runs the webhook, and nothing else of the controller, with the rights of its account
// until the test ends. Images of disks are served by the given one.
func (p *Plane) ServeWebhook(t testing.TB, system, account, server string, namespaces ...string) {
	t.Helper()
	listen := FreeAddress(t)
	p.manage(t, system, account, ctrl.Options{}, func(mgr ctrl.Manager) error {
		return webhook.Setup(mgr, webhook.Options{Server: server, Listen: listen,
			Certificate: p.WebhookCertificate(t, system), Namespaces: namespaces})
	})
	p.Webhook(t, listen)
}

// Controllers run with the rights of their account until the test ends. They work in some
// namespaces, or in all.
func (p *Plane) Controllers(t testing.TB, system, account string, o objects.Options,
	namespaces ...string) {
	t.Helper()
	p.manage(t, system, account, ctrl.Options{
		Cache:                   testtool.Must(controller.Cache(namespaces...))(t),
		GracefulShutdownTimeout: new(time.Duration(0)),
		Controller:              config.Controller{SkipNameValidation: new(true)},
	}, func(mgr ctrl.Manager) error {
		return controller.Setup(mgr, controller.Options{Options: o})
	})
}

// manage runs a manager until the test ends.
func (p *Plane) manage(t testing.TB, system, account string, o ctrl.Options,
	setup func(ctrl.Manager) error) {
	t.Helper()
	o.Scheme, o.Logger = testtool.Must(controller.Scheme())(t), logr.Discard()
	o.Metrics.BindAddress = "0"
	mgr := testtool.Must(ctrl.NewManager(p.ServiceAccount(t, system, account), o))(t)
	require.NoError(t, setup(mgr))
	ctx := t.Context()
	ended := testtool.Go(func() error { return mgr.Start(ctx) })
	t.Cleanup(func() { require.NoError(t, <-ended) })
}

// WebhookCertificate is a directory with the certificate of the webhook, as its pods have it.
func (p *Plane) WebhookCertificate(t testing.TB, system string) string {
	t.Helper()
	var secret corev1.Secret
	require.NoError(t, p.Client.Get(t.Context(), client.ObjectKey{Namespace: system,
		Name: "kubevirt-disk-webhook-certificate"}, &secret))
	dir := t.TempDir()
	for name, data := range secret.Data {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	return dir
}

// startServices starts the proxy, and returns the API server's configuration for it.
func (p *Plane) startServices() (file string, err error) {
	if p.services.listener, err = net.Listen("unix", p.path("services")); err != nil {
		return "", err
	}
	go func() { _ = http.Serve(p.services.listener, &p.services) }() // until stop closes it
	file = p.path("egress.yaml")
	return file, os.WriteFile(file, fmt.Appendf(nil, `
apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection: {proxyProtocol: HTTPConnect, transport: {uds: {udsName: %s}}}
`, p.services.listener.Addr()), 0o600)
}

// ServeHTTP answers CONNECT.
func (s *services) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	far, err := s.dial()
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer far.Close()
	near, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer near.Close()
	if _, err := io.WriteString(near, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	go func() {
		defer far.Close()
		_, _ = io.Copy(far, buffered)
	}()
	_, _ = io.Copy(near, far)
}
