package admission

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const examples = "../../../examples/kubernetes/identities/"

// applyTo is kubectl apply.
func applyTo(t *testing.T, p *plane.Plane, namespace, text string) {
	t.Helper()
	out, err := p.TryKubectl(strings.NewReader(text), "apply", "-n", namespace, "-f", "-")
	require.NoError(t, err, out)
}

// TestProposal applies the objects of proposal 004, in our group, with kubectl.
func TestProposal(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	namespace := p.Namespace(t)
	text := testtool.Must(os.ReadFile(examples + "proposal.yaml"))(t)
	applyTo(t, p, namespace, string(text))

	pod := &corev1.Pod{}
	key := client.ObjectKey{Namespace: namespace, Name: "persistent-vm"}
	require.NoError(t, p.Client.Get(t.Context(), key, pod))
	require.Equal(t, []corev1.PodSchedulingGate{{Name: api.Gate}}, pod.Spec.SchedulingGates,
		"its start is delayed until the identity is ready")
	require.Equal(t, map[string]string{api.LabelIdentity: "persistent-vm",
		api.LabelSet: "test-identity-set"}, pod.Labels)
	disk := pod.Spec.InitContainers[0]
	require.Equal(t, api.DiskContainer, disk.Name)
	require.Contains(t, disk.Env, corev1.EnvVar{Name: "SIZE", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1",
			FieldPath: "metadata.annotations['" + api.AnnotationSize + "']"}}},
		"the controller knows the size when the pod starts")
	claims := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		if v.PersistentVolumeClaim != nil {
			claims[v.PersistentVolumeClaim.ClaimName] = true
		}
		if v.Image != nil {
			require.Equal(t, pod.Spec.Containers[0].Image, v.Image.Reference)
		}
	}
	require.Equal(t, map[string]bool{"vmid-persistent-vm": true}, claims)

	// Check the statements in the proposal's comments.
	_, one, found := strings.Cut(string(text), "---\n")
	require.True(t, found)
	one = strings.Replace(one, "name: persistent-vm", "name: other-vm", 1)
	named := strings.Replace(one, "VirtletVMIdentitySet:",
		"VirtletVMIdentityName: override-identity-name\n    VirtletVMIdentitySet:", 1)
	applyTo(t, p, namespace, named)
	key.Name = "other-vm"
	require.NoError(t, p.Client.Get(t.Context(), key, pod))
	require.Equal(t, "override-identity-name", pod.Labels[api.LabelIdentity])

	one = strings.Replace(one, "name: other-vm", "name: third-vm", 1)
	for wrong, says := range map[string]string{
		strings.Replace(one, "@sha256:a8dd", "@sha256:a8de", 1): "name the image of the set",
		strings.Replace(one, "test-identity-set", "another", 1): `no VMIdentitySet "another" in`,
		strings.Replace(string(text), "foobar-image@sha256", "foobar-image:sha256", 1): "must " +
			"name an image by its digest",
	} {
		out, err := p.TryKubectl(strings.NewReader(wrong), "apply", "-n", namespace, "-f", "-")
		require.Error(t, err)
		require.Contains(t, out, says)
	}
	require.NoError(t, p.Client.DeleteAllOf(t.Context(), &corev1.Pod{},
		client.InNamespace(namespace), client.GracePeriodSeconds(0)))
}

// TestExamples checks the statements in the examples.
func TestExamples(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	namespace := p.Namespace(t)
	for _, name := range []string{"set.yaml", "vm.yaml", "statefulset.yaml", "pet.yaml"} {
		applyTo(t, p, namespace, string(testtool.Must(os.ReadFile(examples+name))(t)))
	}
	// Each pod of a StatefulSet has its own disk. The pods are made one after the other only if the
	// StatefulSet asks for it, because none of them is ready yet.
	eventually(t, "all pods are made", func() bool {
		var pods corev1.PodList
		require.NoError(t, p.Client.List(t.Context(), &pods, client.InNamespace(namespace)))
		identities := map[string]bool{}
		for _, pod := range pods.Items {
			require.Equal(t, "my-fedora", pod.Labels[api.LabelSet])
			identities[pod.Labels[api.LabelIdentity]] = true
		}
		return identities["my-vm"] && identities["my-vms-0"] && identities["my-vms-1"] &&
			identities["my-vms-2"]
	})

	// A ReplicaSet reports why it has no pods, until the disk has a name.
	template := aPod(namespace, "my-fedora")
	template.Labels = map[string]string{"app": "r"}
	replicas := &appsv1.ReplicaSet{}
	replicas.Namespace, replicas.Name = namespace, "r"
	replicas.Spec.Selector = &metav1.LabelSelector{MatchLabels: template.Labels}
	replicas.Spec.Template.ObjectMeta, replicas.Spec.Template.Spec = template.ObjectMeta,
		template.Spec
	replicas.Spec.Template.Namespace, replicas.Spec.Template.Name = "", ""
	require.NoError(t, p.Client.Create(t.Context(), replicas))
	eventually(t, "the ReplicaSet says why it has no pods", func() bool {
		require.NoError(t,
			p.Client.Get(t.Context(), client.ObjectKeyFromObject(replicas), replicas))
		for _, c := range replicas.Status.Conditions {
			if c.Type == appsv1.ReplicaSetReplicaFailure {
				require.Contains(t, c.Message, "the pod has no name yet")
				return true
			}
		}
		return false
	})
	replicas.Spec.Template.Annotations[api.AnnotationName] = "kept"
	require.NoError(t, p.Client.Update(t.Context(), replicas))
	eventually(t, "it has its pod", func() bool {
		var pods corev1.PodList
		require.NoError(t, p.Client.List(t.Context(), &pods, client.InNamespace(namespace),
			client.MatchingLabels{api.LabelIdentity: "kept"}))
		return len(pods.Items) == 1
	})
}
