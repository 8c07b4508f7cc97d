package admission

import (
	"cmp"
	"fmt"
	"regexp"

	corev1 "k8s.io/api/core/v1"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Disk is a disk that a pod asks for.
type Disk struct {
	// Number is the number of the hook sidecar that serves the disk. In a pod without a machine of
	// KubeVirt, the only disk has 0.
	Number  int
	SetName string // of the VMIdentitySet
	Name    string // of the VMIdentity; "": the pod has no name yet
}

// Wanted is a disk that a pod asks for, with its existing objects.
type Wanted struct {
	Disk
	Set      *api.VMIdentitySet // nil: there is none
	Identity *api.VMIdentity    // nil: it will be made for the pod
	// Hydrated: the claim of the disk no longer needs the image.
	Hydrated bool
}

// needsImage reports whether a pod gets the image of a disk as a volume.
func (d Wanted) needsImage() bool { return d.Set.Spec.Population != api.Snapshot && !d.Hydrated }

// furtherAnnotation matches annotations for the disks of a machine after the first.
var furtherAnnotation = regexp.MustCompile(`^disk[.]kubevirt[.]io/identity-(set|name)[.][1-9]$`)

// Disks are the disks that a pod asks for, in the order of their numbers. The first has number 0.
func Disks(pod *corev1.Pod) []Disk {
	if provisions(pod) || !asks(pod, 0) {
		return nil
	}
	all := []Disk{{SetName: SetName(pod, 0), Name: annotation(pod, api.AnnotationName,
		api.AnnotationNameLegacy, cmp.Or(Machine(pod), pod.Name))}}
	for n := 1; n < api.MaxDisks && Machine(pod) != ""; n++ {
		if asks(pod, n) {
			all = append(all, Disk{n, SetName(pod, n),
				annotation(pod, api.Numbered(api.AnnotationName, n), "",
					fmt.Sprintf("%s-%d", Machine(pod), n))})
		}
	}
	return all
}

// asks reports whether an annotation names the set of a disk.
func asks(pod *corev1.Pod, number int) bool {
	_, ours := pod.Annotations[api.Numbered(api.AnnotationSet, number)]
	_, legacy := pod.Annotations[api.AnnotationSetLegacy]
	return ours || legacy && number == 0
}

// SetName is the VMIdentitySet of a disk in a pod; "": none.
func SetName(pod *corev1.Pod, number int) string {
	switch {
	case provisions(pod):
		return ""
	case number > 0:
		return annotation(pod, api.Numbered(api.AnnotationSet, number), "", "")
	}
	return annotation(pod, api.AnnotationSet, api.AnnotationSetLegacy, "")
}

func annotation(pod *corev1.Pod, name, legacy, none string) string {
	for _, key := range []string{name, legacy} {
		if value, ok := pod.Annotations[key]; ok {
			return value
		}
	}
	return none
}

// gate holds the pod until the disk is ready.
func (d Disk) gate() corev1.PodSchedulingGate {
	return corev1.PodSchedulingGate{Name: api.Numbered(api.Gate, d.Number)}
}

func (d Disk) container() string { return fmt.Sprintf("hook-sidecar-%d", d.Number) }

func (d Disk) volume(name string) string {
	if d.Number == 0 {
		return name
	}
	return fmt.Sprintf("%s-%d", name, d.Number)
}

// reserved are the names of everything that Pod adds for the disk.
func (d Disk) reserved() []string {
	if d.Number == 0 {
		return []string{api.DiskContainer, dataVolume, imageVolume, credentialVolume, nbdVolume}
	}
	return []string{d.volume(dataVolume), d.volume(imageVolume), d.volume(nbdVolume)}
}

// nameIt is the annotation that gives the disk another name.
func (d Disk) nameIt() string { return api.Numbered(api.AnnotationName, d.Number) }
