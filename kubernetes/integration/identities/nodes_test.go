package identities

import (
	"context"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// nodes are nodes that the test simulates. Their pods only seem to run.
type nodes struct {
	*world
	names []string
	mu    sync.Mutex
	lost  map[string]bool // nodes that do not answer; guarded by mu
	work  sync.WaitGroup
}

// newNodes makes ready nodes, and runs the pods that are scheduled to them until the test ends.
func newNodes(w *world, names ...string) *nodes {
	w.t.Helper()
	n := &nodes{world: w, names: names, lost: make(map[string]bool)}
	for _, name := range names {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"}}}
		require.NoError(w.t, w.Client.Create(w.t.Context(), node))
		w.t.Cleanup(func() { _ = w.Client.Delete(context.Background(), node) })
		capacity := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"),
			corev1.ResourceMemory: resource.MustParse("64Gi"),
			corev1.ResourcePods:   resource.MustParse("100")}
		w.until("node "+name+" is ready", func() bool {
			err := w.Client.Get(w.t.Context(), client.ObjectKey{Name: name}, node)
			require.NoError(w.t, err)
			node.Status.Capacity, node.Status.Allocatable = capacity, capacity
			node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady,
				Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(),
				LastTransitionTime: metav1.Now()}}
			return w.Client.Status().Update(w.t.Context(), node) == nil
		})
	}
	ctx, stop := context.WithCancel(context.Background())
	n.work.Add(1)
	go n.live(ctx)
	w.t.Cleanup(func() {
		stop()
		n.work.Wait()
	})
	for _, name := range names {
		w.until("node "+name+" takes pods", func() bool {
			node := &corev1.Node{}
			return w.Client.Get(w.t.Context(), client.ObjectKey{Name: name}, node) == nil &&
				len(node.Spec.Taints) == 0
		})
	}
	return n
}

// live does the constant work of a kubelet.
func (n *nodes) live(ctx context.Context) {
	defer n.work.Done()
	var beat time.Time
	for ctx.Err() == nil {
		if time.Since(beat) > 3*time.Second {
			beat = time.Now()
			for _, name := range n.names {
				n.beat(ctx, name)
			}
		}
		var pods corev1.PodList
		if err := n.Client.List(ctx, &pods, client.InNamespace(n.ns)); err == nil {
			for i := range pods.Items {
				n.pod(ctx, &pods.Items[i])
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// beat renews the heartbeat of a node.
func (n *nodes) beat(ctx context.Context, name string) {
	if n.isLost(name) {
		return
	}
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: "kube-node-lease", Name: name}
	err := n.Client.Get(ctx, key, lease)
	now := metav1.NewMicroTime(time.Now())
	lease.Namespace, lease.Name = key.Namespace, key.Name
	lease.Spec.HolderIdentity, lease.Spec.RenewTime = &name, &now
	seconds := int32(40)
	lease.Spec.LeaseDurationSeconds = &seconds
	if apierrors.IsNotFound(err) {
		_ = n.Client.Create(ctx, lease) // or at the next beat
	} else if err == nil {
		_ = n.Client.Update(ctx, lease)
	}
}

func (n *nodes) isLost(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost[name]
}

// pod takes the next step for a pod. A step that fails is taken again.
func (n *nodes) pod(ctx context.Context, p *corev1.Pod) {
	switch {
	case p.Spec.NodeName == "" || n.isLost(p.Spec.NodeName):
	case p.DeletionTimestamp != nil:
		_ = n.Client.Delete(ctx, p, client.GracePeriodSeconds(0))
	case p.Status.Phase != corev1.PodRunning:
		p.Status.Phase = corev1.PodRunning
		_ = n.Client.Status().Update(ctx, p)
	}
}
