package admission

import (
	"context"
	"fmt"
	"net"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/config"
	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/controller/webhook"
	"kubevirt.io/disk/kubernetes/inject"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const account = "kubevirt-disk-controller"

// TestWebhook: without policies, the webhook changes pods as package inject does. It has only the
// rights of its roles. It makes its certificate, and the API server trusts it.
func TestWebhook(t *testing.T) {
	p := plane.Get(t)
	namespace := begin(t, p)
	system := p.Namespace(t)
	listen := plane.FreeAddress(t)
	install(t, p, config.Webhooks(system, account, account))
	direct(t, p, listen)
	run(t, p, system, listen)
	ready(t, p, namespace)
	t.Run("new", func(t *testing.T) { agree(t, p, namespace) })
	t.Run("an identity that is there", func(t *testing.T) { occupied(t, p, namespace) })
	t.Run("changed", func(t *testing.T) { updates(t, p, namespace) })
	t.Run("our own objects", func(t *testing.T) { own(t, p, namespace) })
}

// direct lets the API server ask a process of this machine, because there is no service network.
func direct(t *testing.T, p *plane.Plane, listen string) {
	t.Helper()
	_, port, err := net.SplitHostPort(listen)
	require.NoError(t, err)
	for kind, path := range map[string]string{"MutatingWebhookConfiguration": webhook.PathMutate,
		"ValidatingWebhookConfiguration": webhook.PathValidate} {
		o := &unstructured.Unstructured{}
		o.SetAPIVersion("admissionregistration.k8s.io/v1")
		o.SetKind(kind)
		require.NoError(t, p.Client.Get(t.Context(),
			client.ObjectKey{Name: "pods.disk.kubevirt.io"}, o))
		hooks, _, err := unstructured.NestedSlice(o.Object, "webhooks")
		require.NoError(t, err)
		// The path is the one in the service's reference.
		hook := hooks[0].(map[string]any)
		asked, _, err := unstructured.NestedString(hook, "clientConfig", "service", "path")
		require.NoError(t, err)
		require.Equal(t, path, asked)
		hook["clientConfig"] = map[string]any{
			"url": fmt.Sprintf("https://localhost:%s%s", port, path)}
		require.NoError(t, unstructured.SetNestedSlice(o.Object, hooks, "webhooks"))
		require.NoError(t, p.Client.Update(t.Context(), o))
	}
}

// run runs the webhook with the rights of its service account.
func run(t *testing.T, p *plane.Plane, system, listen string, namespaces ...string) {
	t.Helper()
	scheme, err := controller.Scheme()
	require.NoError(t, err)
	cache, err := controller.Cache(namespaces...)
	require.NoError(t, err)
	mgr, err := ctrl.NewManager(p.ServiceAccount(t, system, account), ctrl.Options{Scheme: scheme,
		Cache: cache, Logger: logr.Discard(), Metrics: metricsserver.Options{BindAddress: "0"}})
	require.NoError(t, err)
	require.NoError(t, webhook.Setup(mgr, webhook.Options{
		Inject: inject.Options{Server: server}, Listen: listen, Namespace: system, Service: account,
		Names: []string{"localhost"}}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
}

// occupied: a pod does not get the disk of another set. Policies cannot check that; with them, the
// controller holds the pod.
func occupied(t *testing.T, p *plane.Plane, namespace string) {
	identity := &api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "vm"},
		Spec: api.VMIdentitySpec{SetName: "large",
			DiskSpec: api.DiskSpec{Image: repository + digest}}}
	require.NoError(t, p.Client.Create(t.Context(), identity))
	_, err := dryRun(t.Context(), p, aPod(namespace, "fedora"))
	require.ErrorContains(t, err, `VMIdentity "vm" belongs to VMIdentitySet "large", and the pod `+
		`names "fedora"`)
	_, err = dryRun(t.Context(), p, aPod(namespace, "large"))
	require.NoError(t, err)
	require.NoError(t, p.Client.Delete(t.Context(), identity))
}

// TestWebhookDown: without the controller, a pod that asks for a disk is refused, and any other pod
// is made.
func TestWebhookDown(t *testing.T) {
	p := plane.Get(t)
	namespace := begin(t, p)
	install(t, p, config.Webhooks(namespace, account, account))
	direct(t, p, plane.FreeAddress(t))
	// The API server notices the configurations a moment later.
	testtool.Within(t, patience, func() bool {
		_, err := dryRun(t.Context(), p, aPod(namespace, "fedora"))
		return err != nil
	}, "the pod is refused")
	plain := aPod(namespace, "")
	plain.Annotations = nil
	require.NoError(t, p.Client.Create(t.Context(), plain))
	before := plain.DeepCopy()
	plain.Labels = map[string]string{"a": "b"}
	require.NoError(t, p.Client.Patch(t.Context(), plain, client.MergeFrom(before)))
}
