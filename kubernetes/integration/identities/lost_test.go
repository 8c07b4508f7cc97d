package identities

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// node makes a node that takes pods. No kubelet runs there, and for an hour nobody misses it.
func (w *world) node(name string) {
	w.t.Helper()
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"),
		corev1.ResourceMemory: resource.MustParse("64Gi"),
		corev1.ResourcePods:   resource.MustParse("100")}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"}},
		Status: corev1.NodeStatus{Capacity: room, Allocatable: room,
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady,
				Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(),
				LastTransitionTime: metav1.Now()}}}}
	require.NoError(w.t, w.Client.Create(w.t.Context(), node))
	w.t.Cleanup(func() { _ = w.Client.Delete(context.Background(), node) })
	w.until("node "+name+" takes pods", func() bool {
		node := &corev1.Node{}
		return w.Client.Get(w.t.Context(), client.ObjectKey{Name: name}, node) == nil &&
			len(node.Spec.Taints) == 0
	})
}

// lose lets Kubernetes know that a node answers no more. Its pods stay as they are.
func (w *world) lose(name string) {
	w.t.Helper()
	w.until("node "+name+" is not ready", func() bool {
		node := &corev1.Node{}
		require.NoError(w.t, w.Client.Get(w.t.Context(), client.ObjectKey{Name: name}, node))
		c := &node.Status.Conditions[0]
		c.Status, c.LastTransitionTime = corev1.ConditionUnknown, metav1.Now()
		return w.Client.Status().Update(w.t.Context(), node) == nil
	})
}

// TestLostNode walks docs/kubernetes-lost-node.md for a VMPet: while its node only does not answer,
// no second machine starts. When the operator has said that the node is off, the machine starts on
// another node with its disk.
func TestLostNode(t *testing.T) {
	commands := plane.Commands(t, "kubernetes-lost-node.md", "")
	require.Len(t, commands, 6)
	w := newWorld(t)
	one, two := w.ns+"-1", w.ns+"-2"
	w.node(one)
	w.node(two)
	w.Volume(t, w.ns, w.ns, "vmid-fedora")
	// A pod stays on a node that does not answer for five minutes, unless it says otherwise.
	pet := &v1alpha1.VMPet{ObjectMeta: metav1.ObjectMeta{Name: "fedora"},
		Spec: v1alpha1.VMPetSpec{Disk: v1alpha1.DiskSpec{Image: image}, Running: new(false)}}
	pet.Spec.Template.Raw = []byte(`{"spec": {
		"tolerations": [
			{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "operator": "Exists",
				"tolerationSeconds": 1},
			{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute", "operator": "Exists",
				"tolerationSeconds": 1}],
		"securityContext": {"runAsNonRoot": true, "runAsUser": 107,
			"seccompProfile": {"type": "RuntimeDefault"}},
		"containers": [{"name": "vm", "image": "vm", "securityContext": {
			"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}]}}`)
	w.make(pet)
	w.until("admission knows the set", func() bool {
		pod := plane.Pod(w.ns, "try", map[string]string{v1alpha1.AnnotationSet: "fedora"})
		err := w.Client.Create(t.Context(), pod, client.DryRunAll)
		return err == nil && len(pod.Spec.SchedulingGates) > 0
	})
	w.Kubectl(t, "-n", w.ns, "patch", "vmpet", "fedora", "--type=merge", "-p",
		`{"spec":{"running":true}}`)
	pod := &corev1.Pod{}
	runs := func(not types.UID) func() bool {
		return func() bool {
			pod = &corev1.Pod{}
			if !w.get("fedora-0", pod) || pod.UID == not || pod.DeletionTimestamp != nil ||
				pod.Spec.NodeName == "" {
				return false
			}
			pod.Status.Phase = corev1.PodRunning // as its kubelet says it
			return w.Client.Status().Update(t.Context(), pod) == nil
		}
	}
	w.until("the machine runs", runs(""))
	first, lost, other := pod.UID, pod.Spec.NodeName, two
	if lost == two {
		other = one
	}
	claim := &corev1.PersistentVolumeClaim{}
	require.True(t, w.get("vmid-fedora", claim))
	disk := claim.UID
	usedBy := func() types.UID {
		id := &v1alpha1.VMIdentity{}
		if !w.get("fedora", id) || id.Status.UsedBy == nil {
			return ""
		}
		return id.Status.UsedBy.UID
	}
	w.until("it is said who uses the disk", func() bool { return usedBy() == first })
	walk := func(number int, name string) string {
		t.Helper()
		command := strings.NewReplacer("kubectl ", "", "NODE", lost, "NAME", name).Replace(
			commands[number])
		return w.Kubectl(t, append(strings.Fields(command), "-n", w.ns)...)
	}

	w.lose(lost)
	w.until("step 1 shows it", func() bool {
		return strings.Contains(w.Kubectl(t, "get", "nodes", lost), "NotReady") &&
			w.get("fedora-0", pod) && pod.DeletionTimestamp != nil
	})
	require.Regexp(t, `(?m)^`+w.ns+` +fedora +.* fedora-0 `, walk(0, ""))
	require.Regexp(t, `(?m)^`+w.ns+` +fedora-0 +.* Terminating `, walk(1, ""))
	time.Sleep(2 * time.Second)
	require.True(t, w.get("fedora-0", pod))
	require.Equal(t, first, pod.UID, "no second machine starts")
	require.Equal(t, first, usedBy())

	walk(2, "")
	walk(3, "fedora-0")
	w.until("the machine runs again", runs(first))
	require.Equal(t, other, pod.Spec.NodeName)
	w.until("the disk is the new pod's", func() bool { return usedBy() == pod.UID })
	require.Contains(t, walk(4, "fedora"), "true")
	require.True(t, w.get("vmid-fedora", claim))
	require.Equal(t, disk, claim.UID)
	walk(5, "")
	node := &corev1.Node{}
	require.NoError(t, w.Client.Get(t.Context(), client.ObjectKey{Name: lost}, node))
	for _, taint := range node.Spec.Taints {
		require.NotEqual(t, corev1.TaintNodeOutOfService, taint.Key)
	}
}
