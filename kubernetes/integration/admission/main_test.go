// Package admission tests on a real API server how pods get their disks when they are made, with
// the chart in several forms. Each applies to the whole cluster, so these tests have a control
// plane of their own.
package admission

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

func TestMain(m *testing.M) { plane.Main(m) }

// timeout is how long anything may take on a busy machine before it counts as broken.
const timeout = 2 * time.Minute

const (
	system     = "kubevirt-disk-system"
	account    = "kubevirt-disk-controller"
	server     = "registry.example.com/kubevirt.io/disk:1"
	repository = "registry.example.com:5000/disks/fedora"
)

var (
	digest = "@sha256:" + strings.Repeat("a", 64)
	other  = "@sha256:" + strings.Repeat("b", 64)
)

// install applies the manifest, and runs its webhook.
func install(t testing.TB, p *plane.Plane) {
	t.Helper()
	apply(t, p)
	p.ServeWebhook(t, system, account, server)
}

// apply applies the manifest. The controller that it is for is not there.
func apply(t testing.TB, p *plane.Plane) {
	t.Helper()
	p.Kubectl(t, "apply", "--server-side", "--force-conflicts", "-f", controllertest.Manifest(t))
}

// newSet is a VMIdentitySet.
func newSet(namespace, name string) *api.VMIdentitySet {
	return &api.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: api.DiskSpec{Image: repository + digest}}
}

func aPod(namespace, set string) *corev1.Pod {
	return plane.Pod(namespace, "vm", map[string]string{api.AnnotationSet: set})
}

func annotate(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i := 0; i < len(pairs); i += 2 {
			p.Annotations[pairs[i]] = pairs[i+1]
		}
	}
}

func image(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Image = name }
}

// dryRun returns what the API server would make from a new pod.
func dryRun(ctx context.Context, p *plane.Plane, pod *corev1.Pod) (*corev1.Pod, error) {
	pod = pod.DeepCopy()
	err := p.Client.Create(ctx, pod, client.DryRunAll)
	return pod, err
}

// begin makes a namespace with two sets.
func begin(t *testing.T, p *plane.Plane) string {
	t.Helper()
	namespace := p.Namespace(t)
	for _, name := range []string{"fedora", "large"} {
		require.NoError(t, p.Client.Create(t.Context(), newSet(namespace, name)))
	}
	return namespace
}
