package admission

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestWebhook: the API server asks the webhook of the manifest about pods. It has only the rights
// of the controller's account, and answers what package admission says.
func TestWebhook(t *testing.T) {
	p := plane.Get(t)
	namespace := begin(t, p)
	install(t, p)
	t.Run("looks like ours", func(t *testing.T) {
		for _, name := range []string{api.Group + "/identityset", api.Group + "/Identity-Name",
			"identityset", "virtletVMIdentitySet", "kubevirt.io/identity-set"} {
			pod := aPod(namespace, "")
			pod.Annotations = map[string]string{name: "x"}
			_, err := dryRun(t.Context(), p, pod)
			require.ErrorContains(t, err, `the annotation "`+name+`" looks like one`)
		}
	})
	t.Run("an identity that is there", func(t *testing.T) { occupied(t, p, namespace) })
	t.Run("changed", func(t *testing.T) { changed(t, p, namespace) })
	t.Run("our own objects", func(t *testing.T) { own(t, p, namespace) })
}

// changed: what names the disk of a pod cannot be changed, and also not come later.
func changed(t *testing.T, p *plane.Plane, namespace string) {
	pod := aPod(namespace, "fedora")
	require.NoError(t, p.Client.Create(t.Context(), pod))
	plain := aPod(namespace, "")
	plain.Name, plain.Annotations = "plain", map[string]string{}
	require.NoError(t, p.Client.Create(t.Context(), plain))
	for _, before := range []*corev1.Pod{pod, plain} {
		after := before.DeepCopy()
		after.Annotations = map[string]string{api.AnnotationSet: "large"}
		// The scheduler may write the pod meanwhile. For a patch, that is no conflict.
		err := p.Client.Patch(t.Context(), after, client.MergeFrom(before), client.DryRunAll)
		require.ErrorContains(t, err, "the annotation disk.kubevirt.io/identity-set names the disk")
		require.NoError(t, p.Client.Delete(t.Context(), before, client.GracePeriodSeconds(0)))
	}
}

// occupied: a pod does not get the disk of another set.
func occupied(t *testing.T, p *plane.Plane, namespace string) {
	identity := &api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "vm"},
		Spec: api.VMIdentitySpec{SetName: "large",
			DiskSpec: api.DiskSpec{Image: repository + digest}}}
	require.NoError(t, p.Client.Create(t.Context(), identity))
	_, err := dryRun(t.Context(), p, aPod(namespace, "fedora"))
	require.ErrorContains(t, err, `VMIdentity "vm" belongs to VMIdentitySet "large", and the pod `+
		`names "fedora"`)
	require.NoError(t, testtool.Err(dryRun(t.Context(), p, aPod(namespace, "large"))))
	require.NoError(t, p.Client.Delete(t.Context(), identity))
}

// TestWebhookDown: while the controller is away, a pod that asks for a disk is refused, because it
// must not start without it. All else goes on: other pods, those of the controller's Deployment,
// and changes of a pod that has its disk, except those of what names the disk.
func TestWebhookDown(t *testing.T) {
	p := plane.Get(t)
	namespace := begin(t, p)
	install(t, p)
	machine := aPod(namespace, "fedora")
	require.NoError(t, p.Client.Create(t.Context(), machine))
	p.NoWebhook()
	p.Kubectl(t, "delete", "pods", "-n", system, "--all", "--force", "--grace-period=0")
	eventually(t, "the controller's pods are made", func() bool {
		return strings.Count(p.Kubectl(t, "get", "pods", "-n", system, "-o", "name"), "\n") == 2
	})
	again := aPod(namespace, "fedora")
	again.Name = "again"
	_, err := dryRun(t.Context(), p, again)
	require.ErrorContains(t, err, `failed calling webhook "pods.disk.kubevirt.io"`)
	plain := aPod(namespace, "")
	plain.Name, plain.Annotations = "plain", nil
	require.NoError(t, p.Client.Create(t.Context(), plain))
	change := func(pod *corev1.Pod, change func(*corev1.Pod)) error {
		after := pod.DeepCopy()
		change(after)
		return p.Client.Patch(t.Context(), after, client.MergeFrom(pod), client.DryRunAll)
	}
	for _, pod := range []*corev1.Pod{plain, machine} {
		require.NoError(t, change(pod, func(p *corev1.Pod) {
			metav1.SetMetaDataLabel(&p.ObjectMeta, "a", "b")
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, api.AnnotationSize, "512")
			p.Finalizers, p.Spec.SchedulingGates = []string{"example.com/f"}, nil
		}), pod.Name)
	}
	for what, with := range map[string]func(*corev1.Pod){
		"the set":         annotate(api.AnnotationSet, "large"),
		"a name":          annotate(api.AnnotationName, "vm"),
		"a name of 004":   annotate(api.AnnotationNameLegacy, "vm"),
		"no set":          func(p *corev1.Pod) { p.Annotations = nil },
		"the identity":    func(p *corev1.Pod) { p.Labels[api.LabelIdentity] = "x" },
		"no set's label":  func(p *corev1.Pod) { delete(p.Labels, api.LabelSet) },
		"an image":        image(repository + other),
		"an image before": func(p *corev1.Pod) { p.Spec.InitContainers[0].Image = "other" },
	} {
		require.ErrorContains(t, change(machine, with), "failed calling webhook", what)
	}
}
