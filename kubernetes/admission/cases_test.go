package admission_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
)

const repository = "registry.example.com:5000/fedora"

// caseSets are the sets of podCases.
func caseSets() (all []*api.VMIdentitySet) {
	for name, change := range map[string]func(*api.DiskSpec){
		"fedora":   func(*api.DiskSpec) {},
		"large":    func(*api.DiskSpec) {},
		"bare":     func(s *api.DiskSpec) { s.Image = "fedora" + digest },
		"snapshot": func(s *api.DiskSpec) { s.Population = api.Snapshot },
		"follows": func(s *api.DiskSpec) {
			s.Population, s.Follow = api.Snapshot, &api.FollowSpec{Tag: "stable"}
		},
		"claim": func(s *api.DiskSpec) {
			s.Image, s.Population = "", api.Snapshot
			s.Source = &api.DiskSource{Claim: "golden"}
		},
		"service":               func(s *api.DiskSpec) { s.Attachment = api.Service },
		strings.Repeat("s", 63): func(*api.DiskSpec) {},
		strings.Repeat("s", 64): func(*api.DiskSpec) {},
	} {
		set := aSet(nil)
		set.Name, set.Spec.Image = name, repository+digest
		change(&set.Spec)
		all = append(all, set)
	}
	return all
}

// podCase is a new pod and the outcome.
type podCase struct {
	set    string
	change func(*corev1.Pod)
	// The pod is refused with a message that contains this text; "": it gets its disk.
	refused string
}

func annotate(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i := 0; i < len(pairs); i += 2 {
			p.Annotations[pairs[i]] = pairs[i+1]
		}
	}
}

// had changes a pod as admission does, and then as the cluster or a person does.
func had(change func(*corev1.Pod)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if err := give(p, caseSets()...); err != nil {
			panic(err)
		}
		if change != nil {
			change(p)
		}
	}
}

// only leaves a pod one annotation.
func only(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{key: value} }
}

func image(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Image = name }
}

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

func container(name string) corev1.Container {
	return corev1.Container{Name: name, Image: "registry.example.com/qemu:1"}
}

// podCases are of any pod.
func podCases() map[string]podCase {
	long := strings.Repeat("n", api.MaxNameLength)
	return map[string]podCase{
		"long set":  {set: strings.Repeat("s", 63)},
		"long name": {set: "fedora", change: annotate(api.AnnotationName, long)},
		"both agree": {set: "fedora", change: annotate(api.AnnotationSetLegacy, "fedora",
			api.AnnotationName, "a", api.AnnotationNameLegacy, "a")},
		"labels and gates of its own": {set: "fedora", change: func(p *corev1.Pod) {
			p.Labels = map[string]string{"app": "x", api.LabelIdentity: "forged"}
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "other.example.com/gate"}}
		}},
		"the gate already": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.Gate}}
		}},
		"generated name": {set: "fedora", change: func(p *corev1.Pod) {
			p.Name, p.GenerateName = "", "vm-"
			p.Annotations[api.AnnotationName] = "one"
		}},
		"another image of a set that follows a tag": {set: "follows",
			change: image(repository + other)},
		"bare image": {set: "bare", change: image("fedora:5000/x" + other)},
		"exported":   {set: "fedora", change: had(nil)},
		"exported while it ran": {set: "fedora", change: had(func(p *corev1.Pod) {
			p.Spec.NodeName, p.Spec.SchedulingGates = "n1", nil
			p.Annotations[api.AnnotationSize] = "512"
		})},
		"exported, of a Service":  {set: "service", change: had(nil)},
		"exported, of a snapshot": {set: "snapshot", change: had(nil)},
		"exported, of a claim":    {set: "claim", change: had(nil)},
		"copied for another disk": {set: "fedora", change: had(
			annotate(api.AnnotationName, "other")), refused: "came from another pod with a disk"},
		"exported, of another image": {set: "fedora", change: had(func(p *corev1.Pod) {
			p.Spec.Volumes[len(p.Spec.Volumes)-1].Image.Reference = "registry.example.com/x" + other
		}), refused: "came from another pod with a disk"},
		"exported, with a container that has no credential": {set: "fedora",
			change: had(func(p *corev1.Pod) {
				p.Spec.Containers = append(p.Spec.Containers, container("log"))
			}), refused: "came from another pod with a disk"},
		"a name that looks like ours": {change: only(api.Group+"/identityset", "fedora"),
			refused: `the annotation "disk.kubevirt.io/identityset" looks like one`},
		"another name that looks like ours": {set: "fedora",
			change:  annotate(api.Group+"/Identity-Name", "x"),
			refused: `the annotation "disk.kubevirt.io/Identity-Name" looks like one`},
		"one without its prefix": {change: only("identityset", "fedora"),
			refused: `the annotation "identityset" looks like one`},
		"one of 004 in lower case": {change: only("virtletVMIdentitySet", "fedora"),
			refused: `the annotation "virtletVMIdentitySet" looks like one`},
		"one with the prefix of KubeVirt": {change: only("kubevirt.io/identity-set", "fedora"),
			refused: `the annotation "kubevirt.io/identity-set" looks like one`},
		"a name without a set": {change: only(api.AnnotationName, "vm"),
			refused: "and no VMIdentitySet: add the annotation disk.kubevirt.io/identity-set"},
		"another digest": {set: "fedora", change: image(repository + other),
			refused: "the pod has image " + repository + other +
				`, and VMIdentitySet "fedora" has ` + repository + digest +
				": name the image of the set, by its digest"},
		"no such set": {set: "none", refused: `there is no VMIdentitySet "none" in namespace "`},
		"no set":      {set: "", refused: `there is no VMIdentitySet "" in namespace "`},
		"no such set of 004": {change: func(p *corev1.Pod) {
			p.Annotations = map[string]string{api.AnnotationSetLegacy: "none"}
		}, refused: `there is no VMIdentitySet "none"`},
		"a set with a long name": {set: strings.Repeat("s", 64),
			refused: "has more than 63 characters"},
		"two sets": {set: "fedora", change: annotate(api.AnnotationSetLegacy, "large"),
			refused: "the annotations disk.kubevirt.io/identity-set and VirtletVMIdentitySet " +
				"differ"},
		"two names": {set: "fedora", change: annotate(api.AnnotationName, "a",
			api.AnnotationNameLegacy, "b"), refused: `VirtletVMIdentityName differ, "a" and "b"`},
		"no name": {set: "fedora", change: func(p *corev1.Pod) {
			p.Name, p.GenerateName = "", "vm-"
		}, refused: "the pod has no name yet"},
		"no name, and a long one later": {set: "fedora", change: func(p *corev1.Pod) {
			p.Name, p.GenerateName = "", strings.Repeat("n", 70)+"-"
		}, refused: "the pod has no name yet"},
		"a pod with a long name": {set: "fedora",
			change:  func(p *corev1.Pod) { p.Name = long + "n" },
			refused: `n" cannot be the name of a VMIdentity: want at most 58 characters`},
		"a long name": {set: "fedora", change: annotate(api.AnnotationName, long+"n"),
			refused: "cannot be the name of a VMIdentity"},
		"an empty name": {set: "fedora", change: annotate(api.AnnotationName, ""),
			refused: `"" cannot be the name of a VMIdentity`},
		"a name in capitals": {set: "fedora", change: annotate(api.AnnotationName, "VM"),
			refused: `"VM" cannot be the name of a VMIdentity`},
		"a name that ends in a dot": {set: "fedora", change: annotate(api.AnnotationName, "vm."),
			refused: `"vm." cannot be the name of a VMIdentity`},
		"a container of that name": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, container(api.DiskContainer))
		}, refused: `the pod has a container or a volume "disk-vda" already: rename it`},
		"a volume of that name": {set: "service", change: func(p *corev1.Pod) {
			p.Labels = map[string]string{api.LabelIdentity: "vm", api.LabelSet: "service"}
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.Gate}}
			p.Spec.Volumes = []corev1.Volume{{Name: "disk-vda-chap",
				VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}, refused: `the pod has a container or a volume "disk-vda-chap" already: rename it`},
		"a mount of that path": {set: "fedora", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "own", VolumeSource: corev1.VolumeSource{
				EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "own",
				MountPath: admission.CredentialDir}}
		}, refused: `container "vm" mounts a volume on /var/run/secrets/disk.kubevirt.io/vda`},
		"a pod for a node": {set: "fedora", change: func(p *corev1.Pod) { p.Spec.NodeName = "n1" },
			refused: "spec.nodeName is set, so the pod cannot wait for its disk"},
	}
}

// severalCases are of machines with several disks.
func severalCases() map[string]podCase {
	second := api.Group + "/identity-set.1"
	return map[string]podCase{
		"disks of two Services": {set: "service", change: launcher(further(9, "service"),
			label("kubevirt.io/migrationJobUID", "m"))},
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
		"a disk that stays, and a Service": {set: "service", change: launcher(
			further(1, "fedora"), label("kubevirt.io/migrationJobUID", "m")),
			refused: `VMIdentitySet "fedora" is in the pod`},
		"two disks, and another digest": {set: "bare", change: launcher(further(1, "fedora"),
			func(p *corev1.Pod) { p.Spec.Containers[0].Image = repository + other }),
			refused: "the pod has image"},
	}
}

// launcherCases are of KubeVirt's pods.
func launcherCases() map[string]podCase {
	migrates := label("kubevirt.io/migrationJobUID", "m")
	return map[string]podCase{
		"a machine that migrates, and a Service": {set: "service", change: launcher(migrates)},
		"a machine with annotations for its hook": {set: "fedora", change: launcher(
			annotate(api.Group+"/bus", "scsi", api.Group+"/boot-order.data.qcow2", "2",
				api.Group+"/transport", "vhost-user"))},
		"annotations for a hook, and no disk of ours": {change: launcher(
			only(api.Group+"/replace", "root"))},
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

// TestPods: a pod gets its disks, once, or is refused and not changed.
func TestPods(t *testing.T) {
	all := podCases()
	maps.Copy(all, launcherCases())
	maps.Copy(all, severalCases())
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			pod := aPod(func(p *corev1.Pod) {
				p.Annotations[api.AnnotationSet] = c.set
				p.Spec.InitContainers, p.Spec.Containers = nil, []corev1.Container{container("vm")}
				if c.change != nil {
					c.change(p)
				}
			})
			before := pod.DeepCopy()
			disks := wanted(pod, caseSets()...)
			err := admission.Pod(pod, "kubevirt.io:disk", disks)
			if c.refused != "" {
				require.ErrorContains(t, err, c.refused)
				require.Equal(t, before, pod)
				return
			}
			require.NoError(t, err)
			require.NoError(t, admission.Made(pod, disks))
			there := map[string]bool{}
			for _, name := range volumeNames(pod) {
				require.False(t, there[name], name)
				there[name] = true
			}
			if len(disks) > 0 {
				require.Empty(t, pod.Spec.NodeName)
			}
		})
	}
}
