package admission

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// launcher makes a pod one in which KubeVirt runs the machine `fedora`, as virt-controller makes
// it: with a hook sidecar, and with all annotations of the machine.
func launcher(more ...func(*corev1.Pod)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		yes := true
		p.Name, p.GenerateName = "", "virt-launcher-fedora-"
		p.Labels = map[string]string{"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": "u"}
		p.Annotations["kubevirt.io/domain"] = "fedora"
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1",
			Kind: "VirtualMachineInstance", Name: "fedora", UID: "u", Controller: &yes,
			BlockOwnerDeletion: &yes}}
		p.Spec.Containers = []corev1.Container{container("compute"),
			container(admission.HookContainer)}
		hook := &p.Spec.Containers[1]
		hook.Env = []corev1.EnvVar{{Name: "CONTAINER_NAME", Value: hook.Name}}
		hook.VolumeMounts = []corev1.VolumeMount{{Name: "hook-sidecar-sockets",
			MountPath: "/var/run/kubevirt-hooks", SubPath: hook.Name}}
		p.Spec.Volumes = []corev1.Volume{{Name: "hook-sidecar-sockets",
			VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		for _, change := range more {
			change(p)
		}
	}
}

// label sets a label.
func label(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels[key] = value }
}

// hookMounts mounts the hook's volume at one more path.
func hookMounts(path string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		hook := &p.Spec.Containers[1]
		hook.VolumeMounts = append(hook.VolumeMounts, corev1.VolumeMount{
			Name: "hook-sidecar-sockets", MountPath: path})
	}
}

// further gives a machine one more disk of a set, and its hook sidecar.
func further(number int, set string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Annotations[api.Numbered(api.AnnotationSet, number)] = set
		p.Spec.Containers = append(p.Spec.Containers,
			container(fmt.Sprintf("hook-sidecar-%d", number)))
	}
}

// severalCases are those of podCases with several disks.
func severalCases() map[string]podCase {
	second := api.Group + "/identity-set.1"
	return map[string]podCase{
		"two disks of one set": {set: "fedora", change: launcher(further(1, "fedora"))},
		"two disks of two sets": {set: "fedora", change: launcher(further(1, "large"),
			annotate(api.AnnotationName+".1", "kept", api.AnnotationName, "first"))},
		"a disk and one of a Service": {set: "fedora", change: launcher(further(1, "service"))},
		"disks of two Services": {set: "service", change: launcher(further(9, "service"),
			label("kubevirt.io/migrationJobUID", "m"))},
		"disks of each kind": {set: "snapshot", change: launcher(further(2, "fedora"),
			further(5, "service"), further(8, "fedora"), further(9, "odd"))},
		"two disks by the names of 004": {change: launcher(only(api.AnnotationSetLegacy, "fedora"),
			further(1, "fedora"))},
		"labels of further disks that lie": {set: "fedora", change: launcher(further(1, "large"),
			label(api.LabelIdentity+".1", "forged"), label(api.LabelSet+".1", "forged"),
			label(api.LabelSeveral, "no"))},
		"two disks of a pod that only has claims bound": {set: "fedora", change: launcher(
			further(1, "none"), annotate("kubevirt.io/ephemeral-provisioning", "true"))},

		"a further disk of another pod": {set: "fedora", change: annotate(second, "fedora"),
			refused: `the annotation "disk.kubevirt.io/identity-set.1" is for a further disk`},
		"a further name of another pod": {set: "fedora",
			change:  annotate(api.AnnotationName+".2", "b"),
			refused: `the annotation "disk.kubevirt.io/identity-name.2" is for a further disk`},
		"an eleventh disk": {set: "fedora", change: launcher(annotate(second+"0", "fedora")),
			refused: `the annotation "disk.kubevirt.io/identity-set.10" looks like one`},
		"a disk number 0": {set: "fedora",
			change:  launcher(annotate(api.AnnotationSet+".0", "fedora")),
			refused: `the annotation "disk.kubevirt.io/identity-set.0" looks like one`},
		"a further disk without a first": {change: launcher(only(second, "fedora")),
			refused: "and there is no first one: name the set of the disk that the container " +
				"hook-sidecar-0 serves"},
		"a further name without a set": {set: "fedora",
			change:  launcher(annotate(api.AnnotationName+".3", "b")),
			refused: "no VMIdentitySet: add the annotation disk.kubevirt.io/identity-set.3"},
		"a further set that is missing": {set: "fedora", change: launcher(further(1, "none")),
			refused: `there is no VMIdentitySet "none"`},
		"a further set without a name": {set: "fedora", change: launcher(further(1, "")),
			refused: `there is no VMIdentitySet ""`},
		"a further set with a long name": {set: "fedora",
			change:  launcher(further(1, strings.Repeat("s", 64))),
			refused: "has more than 63 characters"},
		"two disks of one identity": {set: "fedora", change: launcher(further(1, "fedora"),
			annotate(api.AnnotationName+".1", "fedora")),
			refused: `two disks of the machine have the VMIdentity "fedora": give one of them ` +
				"another name by the annotation disk.kubevirt.io/identity-name.1"},
		"a further identity in capitals": {set: "fedora", change: launcher(further(1, "fedora"),
			annotate(api.AnnotationName+".1", "VM")),
			refused: `"VM" cannot be the name of a VMIdentity`},
		"a further disk, and a forged label": {set: "fedora", change: launcher(
			annotate(second, "fedora"), label(api.LabelIdentity+".1", "fedora-1")),
			refused: "so that the pod has the container hook-sidecar-1"},
		"a further disk without a hook": {set: "fedora",
			change:  launcher(annotate(second, "fedora")),
			refused: "so that the pod has the container hook-sidecar-1"},
		"a further hook with a claim of its own": {set: "fedora", change: launcher(
			further(1, "large"), func(p *corev1.Pod) {
				p.Spec.Containers[2].VolumeMounts = []corev1.VolumeMount{
					{Name: "hook-sidecar-sockets", MountPath: "/data"}}
			}), refused: `container "hook-sidecar-1" mounts a volume on /data, where`},
		"a further disk and a volume of its name": {set: "fedora", change: launcher(
			further(1, "fedora"), func(p *corev1.Pod) {
				p.Spec.Volumes[0].Name = "disk-vda-data-1"
				p.Spec.Containers[1].VolumeMounts[0].Name = "disk-vda-data-1"
			}), refused: `a container or a volume "disk-vda-data-1" already`},
		"two disks for a node": {set: "fedora", change: launcher(further(1, "large"),
			func(p *corev1.Pod) { p.Spec.NodeName = "n1" }), refused: "spec.nodeName is set"},
		"a disk that stays, and a Service": {set: "service", change: launcher(
			further(1, "fedora"), label("kubevirt.io/migrationJobUID", "m")),
			refused: `VMIdentitySet "fedora" is in the pod`},
		"two disks, and another digest": {set: "bare", change: launcher(further(1, "fedora"),
			func(p *corev1.Pod) { p.Spec.Containers[0].Image = repository + other }),
			refused: "the pod has image"},
	}
}

// launcherCases are those of podCases with KubeVirt's pods.
func launcherCases() map[string]podCase {
	migrates := label("kubevirt.io/migrationJobUID", "m")
	return map[string]podCase{
		"a machine of KubeVirt":                              {set: "fedora", change: launcher()},
		"a machine without an image, as its claim is filled": {set: "snapshot", change: launcher()},
		"a machine with a named disk": {set: "fedora",
			change: launcher(annotate(api.AnnotationName, "kept"))},
		"a machine and a Service":                {set: "service", change: launcher()},
		"a machine that migrates, and a Service": {set: "service", change: launcher(migrates)},
		"a machine with annotations for its hook": {set: "fedora", change: launcher(
			annotate(api.Group+"/bus", "scsi", api.Group+"/boot-order.data.qcow2", "2",
				api.Group+"/transport", "vhost-user"))},
		"annotations for a hook, and no disk of ours": {change: launcher(
			only(api.Group+"/replace", "root"))},
		"a hook sidecar with nothing": {set: "fedora", change: launcher(func(p *corev1.Pod) {
			p.Spec.Containers[1].Env, p.Spec.Containers[1].VolumeMounts = nil, nil
			p.Spec.Volumes = nil
		})},
		"more hook sidecars": {set: "fedora", change: launcher(func(p *corev1.Pod) {
			p.Spec.Containers = append([]corev1.Container{container("hook-sidecar-1")},
				p.Spec.Containers...)
		})},
		"a machine's pod that only has claims bound": {set: "none", change: launcher(
			annotate("kubevirt.io/ephemeral-provisioning", "true"))},
		"a pod that only has claims bound, and names a disk": {change: launcher(
			only(api.AnnotationName, "kept"),
			annotate("kubevirt.io/ephemeral-provisioning", "true"))},

		"an annotation for a hook, on another pod": {change: only(api.Group+"/bus", "scsi"),
			refused: `the annotation "disk.kubevirt.io/bus" looks like one`},
		"the label of KubeVirt alone": {set: "fedora", change: launcher(
			annotate(api.Group+"/bus", "scsi"),
			func(p *corev1.Pod) { p.Name, p.OwnerReferences = "vm", nil }),
			refused: `the annotation "disk.kubevirt.io/bus" looks like one`},
		"an owner that is not the controller": {set: "fedora", change: launcher(
			func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }),
			refused: "the pod has no name yet"},
		"an owner of another group": {set: "fedora", change: launcher(
			func(p *corev1.Pod) { p.OwnerReferences[0].APIVersion = "example.com/v1" }),
			refused: "the pod has no name yet"},
		"an annotation of a machine that is nobody's": {set: "fedora",
			change:  launcher(annotate(api.Group+"/busses", "scsi")),
			refused: `the annotation "disk.kubevirt.io/busses" looks like one`},
		"a machine with a long name": {set: "fedora", change: launcher(func(p *corev1.Pod) {
			p.OwnerReferences[0].Name = strings.Repeat("n", api.MaxNameLength+1)
		}), refused: "cannot be the name of a VMIdentity"},
		"a machine whose set is missing": {set: "none", change: launcher(),
			refused: `there is no VMIdentitySet "none"`},
		"a machine without hooks": {set: "fedora", change: launcher(func(p *corev1.Pod) {
			p.Spec.Containers = p.Spec.Containers[:1]
		}), refused: "has no hook sidecar that could serve its disk"},
		"a hook sidecar with a claim of its own": {set: "fedora",
			change:  launcher(hookMounts("/data")),
			refused: `container "hook-sidecar-0" mounts a volume on /data, where`},
		"a hook sidecar with images of its own": {set: "fedora",
			change:  launcher(hookMounts("/disk")),
			refused: `container "hook-sidecar-0" mounts a volume on /disk, where`},
		"a machine with a volume of that name": {set: "fedora", change: launcher(
			func(p *corev1.Pod) { p.Spec.Volumes[0].Name = "disk-vda-data" },
			func(p *corev1.Pod) { p.Spec.Containers[1].VolumeMounts[0].Name = "disk-vda-data" }),
			refused: `a container or a volume "disk-vda-data" already`},
		"a machine for a node": {set: "fedora", change: launcher(
			func(p *corev1.Pod) { p.Spec.NodeName = "n1" }), refused: "spec.nodeName is set"},
		"a machine that migrates": {set: "fedora", change: launcher(migrates),
			refused: "so the machine cannot be migrated: stop it and start it again"},
		"a machine with another digest": {set: "fedora", change: launcher(func(p *corev1.Pod) {
			p.Spec.Containers[1].Image = repository + other
		}), refused: "the pod has image"},
	}
}
