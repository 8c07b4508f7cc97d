package admission_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
)

var (
	digest = "@sha256:" + strings.Repeat("a", 64)
	other  = "@sha256:" + strings.Repeat("b", 64)
)

func aSet(change func(*api.VMIdentitySet)) *api.VMIdentitySet {
	set := &api.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Namespace: "vms", Name: "fedora"},
		Spec: api.DiskSpec{Image: "registry.example.com:5000/fedora:42" + digest,
			Type: api.PersistentVolume, Population: api.Overlay, Attachment: api.Sidecar}}
	if change != nil {
		change(set)
	}
	return set
}

func aPod(change func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "vms", Name: "vm",
			Annotations: map[string]string{api.AnnotationSet: "fedora"}},
		Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Name: "first", Image: "tool"}},
			Containers: []corev1.Container{{Name: "vm", Image: "qemu"}, {Name: "log", Image: "l"}}},
	}
	if change != nil {
		change(pod)
	}
	return pod
}

// give gives a pod its disks of the sets that are there.
func give(pod *corev1.Pod, sets ...*api.VMIdentitySet) error {
	return admission.Pod(pod, "kubevirt.io:disk", wanted(pod, sets...))
}

// wanted are the disks that a pod asks for, of the sets that are there.
func wanted(pod *corev1.Pod, sets ...*api.VMIdentitySet) (all []admission.Wanted) {
	for _, d := range admission.Disks(pod) {
		w := admission.Wanted{Disk: d}
		for _, s := range sets {
			if s.Name == d.SetName {
				w.Set = s
			}
		}
		all = append(all, w)
	}
	return all
}

func names[T any](all []T, name func(T) string) (found []string) {
	for _, one := range all {
		found = append(found, name(one))
	}
	return found
}

func volumeNames(pod *corev1.Pod) []string {
	return names(pod.Spec.Volumes, func(v corev1.Volume) string { return v.Name })
}

func TestPod(t *testing.T) {
	pod := aPod(nil)
	set := aSet(func(s *api.VMIdentitySet) {
		size := resource.MustParse("1000000001")
		s.Spec.Size = &size
	})
	require.NoError(t, give(pod, set))
	require.Equal(t, map[string]string{api.LabelIdentity: "vm", api.LabelSet: "fedora"}, pod.Labels)
	require.Equal(t, []corev1.PodSchedulingGate{{Name: api.Gate}}, pod.Spec.SchedulingGates)
	require.Equal(t, []string{api.DiskContainer, "first"}, names(pod.Spec.InitContainers,
		func(c corev1.Container) string { return c.Name }))
	disk := pod.Spec.InitContainers[0]
	require.Equal(t, "kubevirt.io:disk", disk.Image)
	require.Equal(t, "vmid-vm", disk.EnvFrom[0].SecretRef.Name)
	require.Contains(t, disk.Env, corev1.EnvVar{Name: "SIZE", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{
			FieldPath: "metadata.annotations['disk.kubevirt.io/size']"}}})
	require.Equal(t, []string{"disk-vda-chap", "disk-vda", "disk-vda-data", "disk-vda-image"},
		volumeNames(pod))
	require.Equal(t, "vmid-vm", pod.Spec.Volumes[0].Secret.SecretName)
	require.Equal(t, "vmid-vm", pod.Spec.Volumes[2].PersistentVolumeClaim.ClaimName)
	require.Equal(t, set.Spec.Image, pod.Spec.Volumes[3].Image.Reference)
	for _, c := range pod.Spec.Containers {
		require.Equal(t, []corev1.VolumeMount{{Name: "disk-vda-chap", ReadOnly: true,
			MountPath: "/var/run/secrets/disk.kubevirt.io/vda"}}, c.VolumeMounts, c.Name)
	}
	require.EqualValues(t, 107, *pod.Spec.SecurityContext.FSGroup)
	require.NoError(t, admission.Made(pod, wanted(pod, set)))
}

func TestKindsOfSets(t *testing.T) {
	// A filled claim needs no image.
	pod := aPod(nil)
	require.NoError(t, give(pod, aSet(func(s *api.VMIdentitySet) {
		s.Spec.Population = api.Snapshot
	})))
	require.Equal(t, []string{"disk-vda-chap", "disk-vda", "disk-vda-data"}, volumeNames(pod))

	// A disk that is served elsewhere.
	pod = aPod(nil)
	require.NoError(t, give(pod, aSet(func(s *api.VMIdentitySet) {
		s.Spec.Attachment = api.Service
	})))
	require.Equal(t, []string{"disk-vda-chap"}, volumeNames(pod))
	require.Len(t, pod.Spec.InitContainers, 1)
	require.Nil(t, pod.Spec.SecurityContext)
	require.Len(t, pod.Spec.SchedulingGates, 1)
}

// The annotations of proposal 004.
func TestLegacyAnnotations(t *testing.T) {
	pod := aPod(func(p *corev1.Pod) {
		p.Annotations = map[string]string{api.AnnotationSetLegacy: "fedora",
			api.AnnotationNameLegacy: "kept"}
	})
	require.Len(t, admission.Disks(pod), 1)
	require.NoError(t, give(pod, aSet(nil)))
	require.Equal(t, "kept", pod.Labels[api.LabelIdentity])
	require.Equal(t, "vmid-kept", pod.Spec.Volumes[2].PersistentVolumeClaim.ClaimName)
	require.Empty(t, admission.Disks(&corev1.Pod{}))
}

func TestImages(t *testing.T) {
	for image, allowed := range map[string]bool{
		"registry.example.com:5000/fedora" + digest:    true,
		"registry.example.com:5000/fedora:41" + digest: true,
		"registry.example.com:5000/fedora" + other:     false,
		"registry.example.com:5000/fedora:42":          false,
		"registry.example.com:5000/fedora":             false,
		"registry.example.com:5000/fedora-tools:1":     true,
		"registry.example.com:5000/fedora/tools:1":     true,
		"registry.example.com:5000/fedora:42/tools":    true, // no reference at all
		"other.example.com/fedora" + other:             true,
		"registry.example.com/5000/fedora:42" + other:  true,
		"registry.example.com:5000/fedora2" + other:    true,
	} {
		for place, put := range map[string]func(*corev1.Pod){
			"container":      func(p *corev1.Pod) { p.Spec.Containers[1].Image = image },
			"init container": func(p *corev1.Pod) { p.Spec.InitContainers[0].Image = image },
			"volume": func(p *corev1.Pod) {
				p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
					Image: &corev1.ImageVolumeSource{Reference: image}}}}
			},
		} {
			err := give(aPod(put), aSet(nil))
			require.Equal(t, allowed, err == nil, "%s %s: %v", place, image, err)
		}
	}
}

func TestMade(t *testing.T) {
	for want, change := range map[string]func(*corev1.Pod){
		`there is no VMIdentitySet "other" in namespace "vms"`: func(p *corev1.Pod) {
			p.Annotations[api.AnnotationSet] = "other"
		},
		`the label disk.kubevirt.io/identity must be "vm"`: func(p *corev1.Pod) {
			p.Labels[api.LabelIdentity] = "another"
		},
		"the scheduling gate disk.kubevirt.io/identity is missing": func(p *corev1.Pod) {
			p.Spec.SchedulingGates = nil
		},
		"the pod has image registry.example.com:5000/fedora:43": func(p *corev1.Pod) {
			p.Spec.Containers[0].Image = "registry.example.com:5000/fedora:43"
		},
	} {
		pod := aPod(nil)
		require.NoError(t, give(pod, aSet(nil)))
		change(pod)
		require.ErrorContains(t, admission.Made(pod, wanted(pod, aSet(nil))), want)
	}
	require.ErrorContains(t, admission.Made(aPod(nil), wanted(aPod(nil))),
		"there is no VMIdentitySet")
}

func TestChanged(t *testing.T) {
	before := aPod(nil)
	require.NoError(t, give(before, aSet(nil)))
	for want, change := range map[string]func(*corev1.Pod){
		"the annotation disk.kubevirt.io/identity-set names": func(p *corev1.Pod) {
			delete(p.Annotations, api.AnnotationSet)
		},
		"the annotation VirtletVMIdentitySet names": func(p *corev1.Pod) {
			p.Annotations[api.AnnotationSetLegacy] = "fedora"
		},
		"the annotation disk.kubevirt.io/identity-name names": func(p *corev1.Pod) {
			p.Annotations[api.AnnotationName] = ""
		},
		"the annotation VirtletVMIdentityName names": func(p *corev1.Pod) {
			p.Annotations[api.AnnotationNameLegacy] = "a"
		},
		"the label disk.kubevirt.io/identity names": func(p *corev1.Pod) {
			p.Labels[api.LabelIdentity] = "a"
		},
		"the label disk.kubevirt.io/identity-set names": func(p *corev1.Pod) {
			delete(p.Labels, api.LabelSet)
		},
		"the pod has image": func(p *corev1.Pod) {
			p.Spec.Containers[0].Image = "registry.example.com:5000/fedora"
		},
	} {
		after := before.DeepCopy()
		change(after)
		require.ErrorContains(t, admission.Changed(before, after, wanted(after, aSet(nil))), want)
	}
	// The gate goes, other labels come, and images change as they may. A set that was made anew
	// with another image does not hold a pod that existed before.
	after := before.DeepCopy()
	after.Spec.SchedulingGates, after.Labels["a"] = nil, "b"
	after.Spec.Containers[0].Image = "qemu:2"
	require.NoError(t, admission.Changed(before, after, wanted(after, aSet(nil))))
	require.NoError(t, admission.Changed(before, after, wanted(after)))
	before.Spec.Containers[0].Image = "registry.example.com:5000/fedora" + other
	after = before.DeepCopy()
	after.Spec.SchedulingGates = nil
	require.NoError(t, admission.Changed(before, after, wanted(after, aSet(nil))))
}

func TestIdentity(t *testing.T) {
	set := aSet(nil)
	identity := &api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm"},
		Spec: api.VMIdentitySpec{DiskSpec: set.Spec, SetName: "fedora"}}
	another := func() error {
		pod := aPod(nil)
		disks := wanted(pod, set)
		disks[0].Identity = identity
		return admission.Pod(pod, "kubevirt.io:disk", disks)
	}
	require.NoError(t, another())
	identity.Spec.Image = "another"
	require.ErrorContains(t, another(),
		`VMIdentity "vm" has image another, and VMIdentitySet "fedora" has registry`)
	identity.Spec.FollowedTag = "stable"
	require.NoError(t, another(), "the tag has moved since")
	identity.Spec.FollowedTag = ""
	identity.Spec.Image, identity.Spec.SetName = set.Spec.Image, ""
	require.NoError(t, another(), "a person made or restored it")
	identity.Spec.SetName = "other"
	err := another()
	require.ErrorContains(t, err,
		`VMIdentity "vm" belongs to VMIdentitySet "other", and the pod names "fedora"`)
	require.NotContains(t, err.Error(), "delete", "its data may have been restored")
}

// TestHydrated: a pod gets no image for a disk that needs it no more, and a copy of a pod from
// before or after that is known as one.
func TestHydrated(t *testing.T) {
	without := func(pod *corev1.Pod) error {
		disks := wanted(pod, aSet(nil))
		disks[0].Hydrated = true
		return admission.Pod(pod, "kubevirt.io:disk", disks)
	}
	before := aPod(nil)
	require.NoError(t, give(before, aSet(nil)))
	require.Contains(t, volumeNames(before), "disk-vda-image")
	pod := aPod(nil)
	require.NoError(t, without(pod))
	require.NotContains(t, volumeNames(pod), "disk-vda-image")
	require.NoError(t, admission.Made(pod, wanted(pod, aSet(nil))))
	for _, p := range []*corev1.Pod{pod, before} {
		again := p.DeepCopy()
		require.NoError(t, without(again))
		require.Equal(t, p.Spec, again.Spec)
	}
	require.ErrorContains(t, give(pod.DeepCopy(), aSet(nil)), "already",
		"the disk needs the image again: its claim was restored")

	machine := aLauncher(map[string]string{"identity-set.1": "fedora"})
	require.NoError(t, without(machine))
	require.NotContains(t, volumeNames(machine), "disk-vda-image")
	require.Contains(t, volumeNames(machine), "disk-vda-image-1", "the disk m-1 needs its image")
}

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
