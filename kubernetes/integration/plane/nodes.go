package plane

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Nodes makes nodes on which KWOK simulates pods, and waits until they are ready. They have the
// label kubernetes.io/hostname, room for 1000 pods, and are deleted after the test.
func (p *Plane) Nodes(t testing.TB, names ...string) {
	t.Helper()
	Binaries(t, "kwok", "kwok-stages.yaml")
	p.kwok.Do(func() {
		// KWOK is restarted, because it can crash when it compiles its stages (two goroutines write
		// one map). It keeps no state. It gets no server, which would compile at the same time,
		// too.
		p.kwokErr = p.runAgain("kwok", "--kubeconfig="+p.path("admin.kubeconfig"),
			"--config="+filepath.Join(p.Bin, "kwok-stages.yaml"), "--manage-all-nodes=false",
			"--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
			"--node-port=0", "--node-ip=192.0.2.1",
			// Addresses of pods. A controller that connects to them is refused at once.
			"--cidr=127.64.0.1/16")
	})
	require.NoError(t, p.kwokErr)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for _, name := range names {
		room := corev1.ResourceList{
			corev1.ResourceCPU:              resource.MustParse("64"),
			corev1.ResourceMemory:           resource.MustParse("1Ti"),
			corev1.ResourceEphemeralStorage: resource.MustParse("10Ti"),
			corev1.ResourcePods:             resource.MustParse("1000"),
		}
		// The node has its status like a kubelet's: KWOK writes to it as soon as it exists.
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{"kwok.x-k8s.io/node": "fake"},
			Labels: map[string]string{
				corev1.LabelHostname: name, corev1.LabelOSStable: "linux"}},
			Status: corev1.NodeStatus{Capacity: room, Allocatable: room}}
		require.NoError(t, p.Client.Create(ctx, node))
		t.Cleanup(func() { _ = p.Client.Delete(context.Background(), node) })
	}
	err := p.until("the nodes are ready", func() bool {
		for _, name := range names {
			node := &corev1.Node{}
			if p.Client.Get(ctx, client.ObjectKey{Name: name}, node) != nil || !ready(node) {
				return false
			}
		}
		return true
	})
	if err != nil {
		log, _ := os.ReadFile(p.path("kwok.log"))
		t.Fatalf("%v\n%s", err, log)
	}
}

// ready reports whether pods can be scheduled to a node: a moment after it is ready, the controller
// manager removes its taint.
func ready(node *corev1.Node) bool {
	if len(node.Spec.Taints) > 0 {
		return false
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
