package inject

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

// CredentialDir is where the containers of a pod find the credential of their disk, in the files
// node.session.auth.username and node.session.auth.password.
const CredentialDir = "/var/run/secrets/" + api.Group + "/" + api.Device

// The volumes of a disk: its credential, which is mounted there, its claim and its image.
const (
	credentialVolume = api.DiskContainer + "-chap"
	dataVolume       = api.DiskContainer + "-data"
	imageVolume      = api.DiskContainer + "-image"
	nbdVolume        = api.DiskContainer + "-nbd" // certificates
)

// maxLabel is the most bytes that the value of a label may have.
const maxLabel = 63

// known are the annotations of this product that a pod may have. A pod that was copied or restored
// has those of the controller, too.
var known = []string{api.AnnotationSet, api.AnnotationSetLegacy, api.AnnotationName,
	api.AnnotationNameLegacy, api.AnnotationFirmwareUUID, api.AnnotationSize,
	api.AnnotationDisk, api.AnnotationHandoverRequest}

// meant matches annotations with which somebody means this product.
var meant = regexp.MustCompile(`(?i)^(disk[.]kubevirt[.]io/.*` +
	`|([a-z0-9.-]*kubevirt[.]io/)?(virtlet[-_.]?)?(vm[-_.]?)?identity[-_.]?sets?` +
	`|([a-z0-9.-]*kubevirt[.]io/|virtlet[-_.]?)(vm[-_.]?)?identity[-_.]?names?)$`)

// identityName is the form of a VMIdentity's name (a subdomain of RFC 1123), apart from its length.
var identityName = regexp.MustCompile(
	`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// Options are the choices of the cluster's administrator.
type Options struct {
	// Server is the container image of kubevirt-disk that serves the disks.
	Server string
}

// Asks reports whether a pod asks for a disk.
func Asks(pod *corev1.Pod) bool {
	_, ours := pod.Annotations[api.AnnotationSet]
	_, legacy := pod.Annotations[api.AnnotationSetLegacy]
	return (ours || legacy) && !provisions(pod)
}

// Strange returns what is wrong with a pod that has an annotation which looks like one of this
// product and is none, or that names a disk without saying what it is. Such a pod would run without
// its disk.
func Strange(pod *corev1.Pod) error {
	for _, key := range slices.Sorted(maps.Keys(pod.Annotations)) {
		if Machine(pod) != "" && hookAnnotation.MatchString(key) {
			continue
		}
		if meant.MatchString(key) && !slices.Contains(known, key) {
			return fmt.Errorf("the annotation %q looks like one of this product, and is none: "+
				"%s names the VMIdentitySet, and %s the VMIdentity", key, api.AnnotationSet,
				api.AnnotationName)
		}
	}
	if hasName(pod) && !Asks(pod) && !provisions(pod) {
		return fmt.Errorf("the pod names its VMIdentity by an annotation, and no VMIdentitySet: "+
			"add the annotation %s", api.AnnotationSet)
	}
	return nil
}

// SetName is the VMIdentitySet that a pod names.
func SetName(pod *corev1.Pod) string {
	if provisions(pod) {
		return ""
	}
	return annotation(pod, api.AnnotationSet, api.AnnotationSetLegacy, "")
}

// IdentityName is the VMIdentity that a pod gets. It is empty until the pod has its name. A
// launcher pod gets that of its machine, which stays when the pod goes.
func IdentityName(pod *corev1.Pod) string {
	return annotation(pod, api.AnnotationName, api.AnnotationNameLegacy,
		cmp.Or(Machine(pod), pod.Name))
}

func annotation(pod *corev1.Pod, name, legacy, none string) string {
	for _, key := range []string{name, legacy} {
		if value, ok := pod.Annotations[key]; ok {
			return value
		}
	}
	return none
}

// Pod changes a pod that asks for a disk and is about to be made. The set is the one that the pod
// names, in the pod's namespace, or nil if there is none. If Pod returns an error, the pod is not
// changed.
//
// A pod that has its disk already, because it was exported or restored, keeps it as it is. It only
// waits at its gate again, and gets a node again.
func Pod(pod *corev1.Pod, set *api.VMIdentitySet, o Options) error {
	if err := refuse(pod, set); err != nil {
		return err
	}
	identity := IdentityName(pod)
	changed := pod.DeepCopy()
	had := has(pod, set)
	if changed.Labels == nil {
		changed.Labels = make(map[string]string)
	}
	changed.Labels[api.LabelIdentity] = identity
	changed.Labels[api.LabelSet] = set.Name
	spec := &changed.Spec
	gate := corev1.PodSchedulingGate{Name: api.Gate}
	if !slices.Contains(spec.SchedulingGates, gate) {
		spec.SchedulingGates = append(spec.SchedulingGates, gate)
	}
	if had {
		spec.NodeName = ""
		*pod = *changed
		return nil
	}
	if Machine(pod) != "" {
		launcher(spec, set, identity)
		*pod = *changed
		return nil
	}
	for i := range spec.Containers {
		c := &spec.Containers[i]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: credentialVolume,
			MountPath: CredentialDir, ReadOnly: true})
	}
	secret := api.SecretName(identity)
	spec.Volumes = append(spec.Volumes, corev1.Volume{Name: credentialVolume,
		VolumeSource: corev1.VolumeSource{
			Secret: &corev1.SecretVolumeSource{SecretName: secret}}})
	if set.Spec.Attachment != api.Service {
		disk := vmdisk.Disk{Image: set.Spec.Image, Device: api.Device,
			Filled: set.Spec.Population == api.Snapshot}
		err := vmdisk.AddToPod(spec, []vmdisk.Disk{disk}, vmdisk.Pod{Server: o.Server,
			Secret: secret, Claims: map[string]string{api.Device: api.ClaimName(identity)},
			SizeAnnotation: api.AnnotationSize})
		if err != nil {
			return err
		}
	}
	*pod = *changed
	return nil
}

// has reports whether a pod has all that Pod would add for its disk: then it is a copy of a pod
// that Pod has changed before.
func has(pod *corev1.Pod, set *api.VMIdentitySet) bool {
	sidecar, filled := set.Spec.Attachment != api.Service, set.Spec.Population == api.Snapshot
	name := api.ClaimName(IdentityName(pod))
	there := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		switch v.Name {
		case credentialVolume:
			there[v.Name] = v.Secret != nil && v.Secret.SecretName == name
		case api.DiskContainer:
			there[v.Name] = v.EmptyDir != nil
		case dataVolume:
			there[v.Name] = v.PersistentVolumeClaim != nil &&
				v.PersistentVolumeClaim.ClaimName == name
		case imageVolume:
			there[v.Name] = v.Image != nil && v.Image.Reference == set.Spec.Image
		}
	}
	disk := slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool {
		return c.Name == api.DiskContainer && c.RestartPolicy != nil &&
			*c.RestartPolicy == corev1.ContainerRestartPolicyAlways
	})
	mounted := !slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
		return c.Name == api.DiskContainer ||
			!slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.Name == credentialVolume && m.MountPath == CredentialDir
			})
	})
	return mounted && there[credentialVolume] && disk == sidecar &&
		there[api.DiskContainer] == sidecar && there[dataVolume] == sidecar &&
		there[imageVolume] == (sidecar && !filled)
}

// refuse returns why a pod that is about to be made cannot have its disk. The policies of
// kubernetes/config make the same checks in the same order.
func refuse(pod *corev1.Pod, set *api.VMIdentitySet) error {
	if err := Strange(pod); err != nil {
		return err
	}
	if err := named(pod); err != nil {
		return err
	}
	if set == nil {
		return missing(pod)
	}
	if !has(pod, set) {
		if err := room(pod); err != nil {
			return err
		}
	}
	identity := IdentityName(pod)
	if identity == "" && !hasName(pod) {
		return fmt.Errorf("the pod has no name yet, like those of a ReplicaSet or a Job: use a "+
			"StatefulSet, or name the disk by the annotation %s", api.AnnotationName)
	}
	if len(identity) > api.MaxNameLength || !identityName.MatchString(identity) {
		return fmt.Errorf("%q cannot be the name of a VMIdentity: want at most %d characters, "+
			"a-z, 0-9, - and ., with a letter or a digit at both ends", identity, api.MaxNameLength)
	}
	if err := stays(pod, set); err != nil {
		return err
	}
	return images(pod, set)
}

// room returns why a pod has no room for its disk.
func room(pod *corev1.Pod) error {
	for _, name := range reserved {
		if taken(&pod.Spec, name) {
			return fmt.Errorf("the pod has a container or a volume %q already: rename it, or "+
				"remove it if it came from another pod with a disk", name)
		}
	}
	if Machine(pod) != "" {
		if err := hookRoom(pod); err != nil {
			return err
		}
	}
	for _, c := range pod.Spec.Containers {
		for _, m := range c.VolumeMounts {
			if m.MountPath == CredentialDir {
				return fmt.Errorf("container %q mounts a volume on %s, where the credential of "+
					"its disk will be: mount it elsewhere", c.Name, m.MountPath)
			}
		}
	}
	if pod.Spec.NodeName != "" {
		return fmt.Errorf("spec.nodeName is set, so the pod cannot wait for its disk: " +
			"use spec.nodeSelector or spec.affinity instead")
	}
	return nil
}

// hasName says that a pod names its disk.
func hasName(pod *corev1.Pod) bool {
	_, ours := pod.Annotations[api.AnnotationName]
	_, legacy := pod.Annotations[api.AnnotationNameLegacy]
	return ours || legacy
}

// named checks the annotations.
func named(pod *corev1.Pod) error {
	for _, pair := range [][2]string{{api.AnnotationSet, api.AnnotationSetLegacy},
		{api.AnnotationName, api.AnnotationNameLegacy}} {
		ours, is := pod.Annotations[pair[0]]
		legacy, was := pod.Annotations[pair[1]]
		if is && was && ours != legacy {
			return fmt.Errorf("the annotations %s and %s differ, %q and %q: remove one of them",
				pair[0], pair[1], ours, legacy)
		}
	}
	if name := SetName(pod); len(name) > maxLabel {
		return fmt.Errorf("the name of VMIdentitySet %q has more than %d characters, so pods "+
			"cannot use it: make one with a shorter name", name, maxLabel)
	}
	return nil
}

func missing(pod *corev1.Pod) error {
	return fmt.Errorf("there is no VMIdentitySet %q in namespace %q: make it first, or correct "+
		"the pod's annotation. If it was made just now, try again", SetName(pod), pod.Namespace)
}

// reserved are the names of everything that Pod adds.
var reserved = []string{api.DiskContainer, dataVolume, imageVolume, credentialVolume,
	nbdVolume}

// taken reports whether a container or a volume has a name.
func taken(spec *corev1.PodSpec, name string) bool {
	return slices.ContainsFunc(slices.Concat(spec.InitContainers, spec.Containers),
		func(c corev1.Container) bool { return c.Name == name }) ||
		slices.ContainsFunc(spec.Volumes,
			func(v corev1.Volume) bool { return v.Name == name })
}

// images refuses another image of the set's repository, because the machine would then run beside a
// disk of another version.
func images(pod *corev1.Pod, set *api.VMIdentitySet) error {
	reference, digest, _ := strings.Cut(set.Spec.Image, "@")
	repository := reference
	if colon := strings.LastIndex(reference, ":"); colon > strings.LastIndex(reference, "/") {
		repository = reference[:colon]
	}
	for _, image := range references(pod) {
		rest, same := strings.CutPrefix(image, repository)
		same = same && !strings.Contains(rest, "/") &&
			(rest == "" || rest[0] == ':' || rest[0] == '@')
		if same && !strings.HasSuffix(image, "@"+digest) {
			return fmt.Errorf("the pod has image %s, and VMIdentitySet %q has %s: name the image "+
				"of the set, by its digest", image, set.Name, set.Spec.Image)
		}
	}
	return nil
}

// references are the images that a pod names.
func references(pod *corev1.Pod) []string {
	var all []string
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		all = append(all, c.Image)
	}
	for _, v := range pod.Spec.Volumes {
		if v.Image != nil {
			all = append(all, v.Image.Reference)
		}
	}
	return all
}

// Made checks a pod that is about to be made, after everything that changes pods has changed it.
func Made(pod *corev1.Pod, set *api.VMIdentitySet) error {
	if err := named(pod); err != nil {
		return err
	}
	if set == nil || pod.Labels[api.LabelSet] != SetName(pod) {
		return missing(pod)
	}
	if identity := IdentityName(pod); pod.Labels[api.LabelIdentity] != identity {
		return fmt.Errorf("the label %s must be %q, as admission made it", api.LabelIdentity,
			identity)
	}
	if !slices.Contains(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: api.Gate}) {
		return fmt.Errorf("the scheduling gate %s is missing: the pod has to wait for its disk",
			api.Gate)
	}
	return images(pod, set)
}

// Changed checks an update of a pod. The set is nil if it no longer exists.
func Changed(before, after *corev1.Pod, set *api.VMIdentitySet) error {
	for _, key := range []string{api.AnnotationSet, api.AnnotationSetLegacy, api.AnnotationName,
		api.AnnotationNameLegacy} {
		if !same(before.Annotations, after.Annotations, key) {
			return unchangeable("annotation", key)
		}
	}
	for _, key := range []string{api.LabelIdentity, api.LabelSet} {
		if !same(before.Labels, after.Labels, key) {
			return unchangeable("label", key)
		}
	}
	if set == nil || slices.Equal(references(before), references(after)) {
		return nil
	}
	return images(after, set)
}

func unchangeable(kind, key string) error {
	return fmt.Errorf("the %s %s names the disk of the pod, and cannot be changed: delete the "+
		"pod, and make it again", kind, key)
}

func same(before, after map[string]string, key string) bool {
	was, had := before[key]
	is, has := after[key]
	return had == has && was == is
}

// Identity checks that an existing VMIdentity is the one that a pod asks for. Policies cannot check
// that. In clusters with policies, the controller finds the difference, and the pod keeps its gate.
func Identity(set *api.VMIdentitySet, identity *api.VMIdentity) error {
	const advice = "name that set, or another disk by the annotation " + api.AnnotationName
	// A VMIdentity that a person made, or restored, may be of no set.
	if identity.Spec.SetName != "" && identity.Spec.SetName != set.Name {
		return fmt.Errorf("VMIdentity %q belongs to VMIdentitySet %q, and the pod names %q: %s",
			identity.Name, identity.Spec.SetName, set.Name, advice)
	}
	if identity.Spec.Image != set.Spec.Image {
		return fmt.Errorf("VMIdentity %q has image %s, and VMIdentitySet %q has %s: use the "+
			"former image, or name another disk by the annotation %s", identity.Name,
			identity.Spec.Image, set.Name, set.Spec.Image, api.AnnotationName)
	}
	return nil
}
