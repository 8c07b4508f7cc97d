package admission_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// aLauncher is a pod in which KubeVirt runs machine `m` with three hook sidecars, whose first disk
// is of set `fedora`, and the others of the sets in the annotations.
func aLauncher(annotations map[string]string) *corev1.Pod {
	return aPod(func(p *corev1.Pod) {
		p.Name = "virt-launcher-m-x"
		p.Labels = map[string]string{"kubevirt.io": "virt-launcher"}
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Name: "m",
			Kind: "VirtualMachineInstance", Controller: new(true)}}
		for key, value := range annotations {
			p.Annotations[api.Group+"/"+key] = value
		}
		p.Spec.Containers = []corev1.Container{{Name: "hook-sidecar-2"}, {Name: "compute"},
			{Name: "hook-sidecar-0"}, {Name: "hook-sidecar-1"}}
	})
}

func TestDisks(t *testing.T) {
	pod := aLauncher(map[string]string{"identity-set.9": "b", "identity-set.2": "a",
		"identity-name.2": "kept"})
	require.Equal(t, []admission.Disk{{SetName: "fedora", Name: "m"},
		{Number: 2, SetName: "a", Name: "kept"}, {Number: 9, SetName: "b", Name: "m-9"}},
		admission.Disks(pod))
	pod.Annotations["kubevirt.io/ephemeral-provisioning"] = "true"
	require.Empty(t, admission.Disks(pod))
	require.Empty(t, admission.SetName(pod, 2))
}

// TestSeveralDisks: each disk has its own gate, labels, volumes and container. Two of them may be
// of one set.
func TestSeveralDisks(t *testing.T) {
	pod := aLauncher(map[string]string{"identity-set.1": "service", "identity-set.2": "fedora",
		"identity-name.2": "kept"})
	service := aSet(func(s *api.VMIdentitySet) {
		s.Name, s.Spec.Attachment = "service", api.Service
	})
	require.NoError(t, give(pod, service, aSet(nil)))
	require.Equal(t, map[string]string{"kubevirt.io": "virt-launcher",
		"disk.kubevirt.io/several":  "true",
		"disk.kubevirt.io/identity": "m", "disk.kubevirt.io/identity-set": "fedora",
		"disk.kubevirt.io/identity.1": "m-1", "disk.kubevirt.io/identity-set.1": "service",
		"disk.kubevirt.io/identity.2": "kept", "disk.kubevirt.io/identity-set.2": "fedora",
	}, pod.Labels)
	require.Equal(t, []corev1.PodSchedulingGate{{Name: "disk.kubevirt.io/identity"},
		{Name: "disk.kubevirt.io/identity.1"}, {Name: "disk.kubevirt.io/identity.2"}},
		pod.Spec.SchedulingGates)
	require.Equal(t, []string{"disk-vda-data", "disk-vda-image", "disk-vda-nbd-1",
		"disk-vda-data-2", "disk-vda-image-2"}, volumeNames(pod))
	require.Equal(t, "vmid-m", pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName)
	require.Equal(t, "vmnbd-m-1", pod.Spec.Volumes[2].Secret.SecretName)
	require.Equal(t, "vmid-kept", pod.Spec.Volumes[3].PersistentVolumeClaim.ClaimName)
	for i, want := range map[int]struct{ env, path, mount string }{
		0: {"SIZE", "metadata.annotations['disk.kubevirt.io/size.2']", "disk-vda-data-2"},
		2: {"SIZE", "metadata.annotations['disk.kubevirt.io/size']", "disk-vda-data"},
		3: {"DISK", "metadata.annotations['disk.kubevirt.io/disk.1']", "disk-vda-nbd-1"},
	} {
		c := pod.Spec.Containers[i]
		require.Equal(t, want.env, c.Env[0].Name)
		require.Equal(t, want.path, c.Env[0].ValueFrom.FieldRef.FieldPath)
		require.Equal(t, want.mount, c.VolumeMounts[0].Name)
	}
	require.Empty(t, pod.Spec.Containers[1].VolumeMounts)
	require.NoError(t, admission.Made(pod, wanted(pod, service, aSet(nil))))
	require.Equal(t, "hook-sidecar-2", admission.Hook(pod, 2).Name)
	require.Nil(t, admission.Hook(pod, 1), "it serves no claim")
	require.Nil(t, admission.Hook(pod, 3))

	for want, change := range map[string]func(*corev1.Pod){
		`there is no VMIdentitySet "none"`: func(p *corev1.Pod) {
			p.Annotations["disk.kubevirt.io/identity-set.2"] = "none"
		},
		`the label disk.kubevirt.io/identity.2 must be "kept"`: func(p *corev1.Pod) {
			p.Labels["disk.kubevirt.io/identity.2"] = "m"
		},
		"the scheduling gate disk.kubevirt.io/identity.1 is missing": func(p *corev1.Pod) {
			p.Spec.SchedulingGates = append(p.Spec.SchedulingGates[:1],
				p.Spec.SchedulingGates[2:]...)
		},
		"the label disk.kubevirt.io/several must be": func(p *corev1.Pod) {
			delete(p.Labels, api.LabelSeveral)
		},
		`two disks of the machine have the VMIdentity "m"`: func(p *corev1.Pod) {
			p.Annotations["disk.kubevirt.io/identity-name.1"] = "m"
		},
	} {
		changed := pod.DeepCopy()
		change(changed)
		require.ErrorContains(t, admission.Made(changed, wanted(changed, service, aSet(nil))), want)
	}
	for want, change := range map[string]func(*corev1.Pod){
		"the annotation disk.kubevirt.io/identity-set.3 names": func(p *corev1.Pod) {
			p.Annotations["disk.kubevirt.io/identity-set.3"] = "fedora"
		},
		"the annotation disk.kubevirt.io/identity-name.2 names": func(p *corev1.Pod) {
			delete(p.Annotations, "disk.kubevirt.io/identity-name.2")
		},
		"the label disk.kubevirt.io/identity.1 names": func(p *corev1.Pod) {
			p.Labels["disk.kubevirt.io/identity.1"] = "another"
		},
		"the label disk.kubevirt.io/several names": func(p *corev1.Pod) {
			delete(p.Labels, api.LabelSeveral)
		},
	} {
		changed := pod.DeepCopy()
		change(changed)
		err := admission.Changed(pod, changed, wanted(changed, service, aSet(nil)))
		require.ErrorContains(t, err, want)
	}
}

// TestIdentityOfAFurtherDisk: the advice names the annotation of that disk.
func TestIdentityOfAFurtherDisk(t *testing.T) {
	identity := &api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "m-2"},
		Spec: api.VMIdentitySpec{DiskSpec: aSet(nil).Spec, SetName: "other"}}
	pod := aLauncher(map[string]string{"identity-set.2": "fedora"})
	disks := wanted(pod, aSet(nil))
	disks[1].Identity = identity
	require.ErrorContains(t, admission.Pod(pod, "kubevirt.io:disk", disks),
		"another disk by the annotation disk.kubevirt.io/identity-name.2")
}
