package identities

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/disk/transfer"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// nodes are nodes that the test simulates. The commands of pods that move a disk run in the test's
// process, with the directories of local volumes and over loopback; other pods only seem to run.
type nodes struct {
	*world
	names []string
	mu    sync.Mutex
	runs  map[types.UID]func() // ends the work of a pod; guarded by mu
	lost  map[string]bool      // nodes that do not answer; guarded by mu
	work  sync.WaitGroup
}

// newNodes makes ready nodes, and runs the pods that are scheduled to them until the test ends.
func newNodes(w *world, names ...string) *nodes {
	w.t.Helper()
	n := &nodes{world: w, names: names, runs: make(map[types.UID]func()),
		lost: make(map[string]bool)}
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

// pod takes the next step for a pod.
func (n *nodes) pod(ctx context.Context, p *corev1.Pod) {
	n.mu.Lock()
	end, runs := n.runs[p.UID]
	n.mu.Unlock()
	switch {
	case p.Spec.NodeName == "" || n.isLost(p.Spec.NodeName):
	case p.DeletionTimestamp != nil:
		if runs {
			end()
		}
		_ = n.Client.Delete(ctx, p, client.GracePeriodSeconds(0))
	case runs || objects.Finished(p):
	default:
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan struct{})
		n.mu.Lock()
		n.runs[p.UID] = func() { cancel(); <-ended }
		address := fmt.Sprintf("127.77.%d.%d", len(n.runs), 1+len(n.names))
		n.mu.Unlock()
		n.work.Add(1)
		go func() {
			defer n.work.Done()
			defer close(ended)
			defer cancel()
			n.run(ctx, p, address)
		}()
	}
}

// run is the life of a pod.
func (n *nodes) run(ctx context.Context, p *corev1.Pod, address string) {
	n.status(ctx, p, corev1.PodStatus{Phase: corev1.PodRunning, PodIP: address,
		PodIPs: []corev1.PodIP{{IP: address}}})
	args := p.Spec.Containers[0].Args
	if len(args) == 0 {
		return
	}
	err := n.move(ctx, p, args, address)
	if ctx.Err() != nil {
		return
	}
	s := corev1.PodStatus{Phase: corev1.PodSucceeded, PodIP: address}
	if err != nil {
		s.Phase = corev1.PodFailed
		s.ContainerStatuses = []corev1.ContainerStatus{{Name: "move", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: err.Error()}}}}
	}
	n.status(ctx, p, s)
}

func (n *nodes) status(ctx context.Context, p *corev1.Pod, s corev1.PodStatus) {
	for ctx.Err() == nil {
		now := &corev1.Pod{}
		err := n.Client.Get(ctx, client.ObjectKeyFromObject(p), now)
		if err == nil && now.UID == p.UID {
			s.Conditions = now.Status.Conditions
			now.Status = s
			err = n.Client.Status().Update(ctx, now)
		}
		if err == nil || apierrors.IsNotFound(err) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// move does the work of the commands of kubevirt-disk-controller.
func (n *nodes) move(ctx context.Context, p *corev1.Pod, args []string, address string) error {
	dir, err := n.dir(ctx, p)
	if err != nil {
		return err
	}
	credential := &corev1.Secret{}
	key := client.ObjectKey{Namespace: n.ns, Name: p.Spec.Volumes[2].Secret.SecretName}
	if err := n.Client.Get(ctx, key, credential); err != nil {
		return err
	}
	secret, err := transfer.NewSecret(credential.Data["node.session.auth.password"])
	if err != nil {
		return err
	}
	const secretFile = "--secret-file=/etc/secret/node.session.auth.password"
	switch text := strings.Join(args, " "); {
	case text == "send /data --listen=:9259 "+secretFile:
		source, err := transfer.OpenSource(dir)
		if err != nil {
			return err
		}
		defer source.Close()
		l, err := net.Listen("tcp", address+":9259")
		if err != nil {
			return err
		}
		return transfer.Serve(ctx, l, secret, source, new(transfer.Progress), func(error) {})
	case len(args) == 5 && text == "receive --replace "+args[2]+" /data "+secretFile:
		target, err := transfer.OpenTarget(dir, true)
		if err != nil {
			return err
		}
		defer target.Close()
		return transfer.Fetch(ctx, args[2], secret, target, new(transfer.Progress))
	}
	return fmt.Errorf("no such command: %q", args)
}

// dir is the directory of a pod's local volume.
func (n *nodes) dir(ctx context.Context, p *corev1.Pod) (string, error) {
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	err := n.Client.Get(ctx, client.ObjectKey{Namespace: n.ns,
		Name: p.Spec.Volumes[0].PersistentVolumeClaim.ClaimName}, claim)
	if err == nil {
		err = n.Client.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, volume)
	}
	if err == nil && volume.Spec.Local == nil {
		err = errors.New("the volume is not local")
	}
	if err != nil {
		return "", err
	}
	return volume.Spec.Local.Path, nil
}
