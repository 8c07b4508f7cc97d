package admission

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// updates changes an existing pod, and compares the result with that of package admission.
func updates(t *testing.T, p *plane.Plane, namespace string) {
	pod := aPod(namespace, "fedora")
	pod.Spec.Containers[0].Image = repository + digest
	require.NoError(t, p.Client.Create(t.Context(), pod))
	plain := aPod(namespace, "")
	plain.Name, plain.Annotations = "plain", nil
	require.NoError(t, p.Client.Create(t.Context(), plain))
	machine := aPod(namespace, "fedora")
	launcher(further(1, "bare"))(machine)
	machine.Name = "machine"
	require.NoError(t, p.Client.Create(t.Context(), machine))
	set, bare := setOf(t, p, namespace, "fedora"), setOf(t, p, namespace, "bare")
	for name, c := range map[string]struct {
		pod     *corev1.Pod
		change  func(*corev1.Pod)
		refused string
	}{
		"label":   {pod, func(p *corev1.Pod) { p.Labels["app"] = "x" }, ""},
		"ungated": {pod, func(p *corev1.Pod) { p.Spec.SchedulingGates = nil }, ""},
		"image":   {pod, image("registry.example.com/qemu:2"), ""},
		"set": {pod, annotate(api.AnnotationSet, "large"),
			"annotation disk.kubevirt.io/identity-set"},
		"004": {pod, annotate(api.AnnotationSetLegacy, "fedora"),
			"annotation VirtletVMIdentitySet"},
		"name": {pod, annotate(api.AnnotationName, "vm"),
			"annotation disk.kubevirt.io/identity-name"},
		"name, 004": {pod, annotate(api.AnnotationNameLegacy, "vm"),
			"annotation VirtletVMIdentityName"},
		"no set": {pod, func(p *corev1.Pod) { delete(p.Annotations, api.AnnotationSet) },
			"annotation disk.kubevirt.io/identity-set"},
		"identity": {pod, func(p *corev1.Pod) { p.Labels[api.LabelIdentity] = "x" },
			"label disk.kubevirt.io/identity "},
		"set's label": {pod, func(p *corev1.Pod) { delete(p.Labels, api.LabelSet) },
			"label disk.kubevirt.io/identity-set"},
		"another digest": {pod, image(repository + other), "the pod has image"},
		"later": {plain, func(p *corev1.Pod) {
			p.Annotations = map[string]string{api.AnnotationSet: "fedora"}
		}, "annotation disk.kubevirt.io/identity-set"},
		"further, later": {plain, func(p *corev1.Pod) {
			p.Annotations = map[string]string{api.AnnotationSet + ".1": "fedora"}
		}, "annotation disk.kubevirt.io/identity-set.1"},
		"further set": {machine, annotate(api.AnnotationSet+".1", "fedora"),
			"annotation disk.kubevirt.io/identity-set.1"},
		"further name": {machine, annotate(api.AnnotationName+".1", "fedora-1"),
			"annotation disk.kubevirt.io/identity-name.1"},
		"one more": {machine, annotate(api.AnnotationSet+".9", "fedora"),
			"annotation disk.kubevirt.io/identity-set.9"},
		"further identity": {machine, label(api.LabelIdentity+".1", "x"),
			"label disk.kubevirt.io/identity.1 "},
		"further set's label": {machine, func(p *corev1.Pod) {
			delete(p.Labels, api.LabelSet+".1")
		}, "label disk.kubevirt.io/identity-set.1 "},
		"several": {machine, func(p *corev1.Pod) { delete(p.Labels, api.LabelSeveral) },
			"label disk.kubevirt.io/several "},
		"a gate": {machine, func(p *corev1.Pod) {
			p.Spec.SchedulingGates = p.Spec.SchedulingGates[1:]
		}, ""},
		"another digest for one of two": {machine, image("fedora:2"), `VMIdentitySet "bare" has`},
		"another pod": {plain, func(p *corev1.Pod) {
			p.Annotations = map[string]string{"a": "b"}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			before, after := &corev1.Pod{}, &corev1.Pod{}
			require.NoError(t, p.Client.Get(t.Context(), client.ObjectKeyFromObject(c.pod), before))
			before.DeepCopyInto(after)
			c.change(after)
			var disks []admission.Wanted
			for i, d := range admission.Disks(after) {
				disks = append(disks, admission.Wanted{Disk: d,
					Set: []*api.VMIdentitySet{set, bare}[min(i, 1)]})
			}
			want := admission.Changed(before, after, disks)
			// The scheduler may write the pod meanwhile. For a patch, that is no conflict.
			err := p.Client.Patch(t.Context(), after.DeepCopy(), client.MergeFrom(before),
				client.DryRunAll)
			if c.refused == "" {
				require.NoError(t, want)
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, want, c.refused)
			require.ErrorContains(t, err, want.Error())
		})
	}
	// A deleted set holds up no pod.
	require.NoError(t, p.Client.Delete(t.Context(), set))
	require.NoError(t, p.Client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod))
	before := pod.DeepCopy()
	pod.Labels["app"] = "x"
	require.NoError(t, p.Client.Patch(t.Context(), pod, client.MergeFrom(before)))
	require.NoError(t, p.Client.Delete(t.Context(), pod, client.GracePeriodSeconds(0)))
	require.NoError(t, p.Client.Delete(t.Context(), machine, client.GracePeriodSeconds(0)))
}
