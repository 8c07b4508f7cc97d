package admission

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

// CredentialDir is the directory with the credential of a pod's disk in its containers, in the
// files node.session.auth.username and node.session.auth.password.
const CredentialDir = "/var/run/secrets/" + api.Group + "/" + api.Device

// The volumes of the disk with number 0: its credential, its claim and its image.
const (
	credentialVolume = api.DiskContainer + "-chap"
	dataVolume       = api.DiskContainer + "-data"
	imageVolume      = api.DiskContainer + "-image"
	nbdVolume        = api.DiskContainer + "-nbd" // certificates
)

// maxLabel is the most bytes that the value of a label may have.
const maxLabel = 63

// known are the annotations of this product that a pod may have. A copied or restored pod has those
// of the controller, too.
var known = []string{api.AnnotationSet, api.AnnotationSetLegacy, api.AnnotationName,
	api.AnnotationNameLegacy, api.AnnotationFirmwareUUID, api.AnnotationSize,
	api.AnnotationBlockSize, api.AnnotationDisk, api.AnnotationHandoverRequest}

// meant matches annotations that are probably meant for this product.
var meant = regexp.MustCompile(`(?i)^(disk[.]kubevirt[.]io/.*` +
	`|([a-z0-9.-]*kubevirt[.]io/)?(virtlet[-_.]?)?(vm[-_.]?)?identity[-_.]?sets?` +
	`|([a-z0-9.-]*kubevirt[.]io/|virtlet[-_.]?)(vm[-_.]?)?identity[-_.]?names?)$`)

// identityName is the form of a VMIdentity's name (a subdomain of RFC 1123), apart from its length.
var identityName = regexp.MustCompile(
	`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// strange returns the error in a pod with an annotation that looks like one of this product and is
// none, or that names a disk without a set. Such a pod would run without its disk.
func strange(pod *corev1.Pod) error {
	keys, machine := slices.Sorted(maps.Keys(pod.Annotations)), Machine(pod) != ""
	for _, key := range keys {
		if furtherAnnotation.MatchString(key) && !machine {
			return fmt.Errorf("the annotation %q is for a further disk of a machine of KubeVirt, "+
				"and any other pod has one disk: name its VMIdentitySet by %s, and remove this "+
				"annotation", key, api.AnnotationSet)
		}
	}
	for _, key := range keys {
		if machine && (hookAnnotation.MatchString(key) || furtherAnnotation.MatchString(key)) {
			continue
		}
		if meant.MatchString(key) && !slices.Contains(known, key) {
			return fmt.Errorf("the annotation %q looks like one of this product, and is none: "+
				"%s names the VMIdentitySet, and %s the VMIdentity", key, api.AnnotationSet,
				api.AnnotationName)
		}
	}
	if provisions(pod) {
		return nil
	}
	for n := range api.MaxDisks {
		if hasName(pod, n) && !asks(pod, n) {
			return fmt.Errorf("the pod names its VMIdentity by an annotation, and no "+
				"VMIdentitySet: add the annotation %s", api.Numbered(api.AnnotationSet, n))
		}
	}
	for n := 1; n < api.MaxDisks; n++ {
		if asks(pod, n) && !asks(pod, 0) {
			return fmt.Errorf("the annotation %s is for a further disk of the machine, and there "+
				"is no first one: name the set of the disk that the container %s serves by the "+
				"annotation %s", api.Numbered(api.AnnotationSet, n), Disk{}.container(),
				api.AnnotationSet)
		}
	}
	return nil
}

// Pod gives a new pod its disks, those of Disks. The server is the container image of kubevirt-disk
// that serves them. If Pod returns an error, the pod is not changed.
//
// A pod that was exported or restored already has its disk, which stays unchanged. Such a pod only
// gets its gate again, and a new node.
func Pod(pod *corev1.Pod, server string, disks []Wanted) error {
	if err := refuse(pod, disks); err != nil || len(disks) == 0 {
		return err
	}
	changed := pod.DeepCopy()
	if changed.Labels == nil {
		changed.Labels = make(map[string]string)
	}
	spec := &changed.Spec
	for _, d := range disks {
		changed.Labels[api.Numbered(api.LabelIdentity, d.Number)] = d.Name
		changed.Labels[api.Numbered(api.LabelSet, d.Number)] = d.SetName
		if !slices.Contains(spec.SchedulingGates, d.gate()) {
			spec.SchedulingGates = append(spec.SchedulingGates, d.gate())
		}
	}
	if len(disks) > 1 {
		changed.Labels[api.LabelSeveral] = several
	}
	var err error
	switch {
	case has(pod, disks[0]):
		spec.NodeName = ""
	case Machine(pod) != "":
		for _, d := range disks {
			launcher(spec, d)
		}
	default:
		err = sidecar(spec, disks[0], server)
	}
	if err == nil {
		*pod = *changed
	}
	return err
}

// several is the value of api.LabelSeveral.
const several = "true"

// sidecar gives a pod other than a launcher its disk.
func sidecar(spec *corev1.PodSpec, d Wanted, server string) error {
	for i := range spec.Containers {
		c := &spec.Containers[i]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: credentialVolume,
			MountPath: CredentialDir, ReadOnly: true})
	}
	secret := api.SecretName(d.Name)
	spec.Volumes = append(spec.Volumes, corev1.Volume{Name: credentialVolume,
		VolumeSource: corev1.VolumeSource{
			Secret: &corev1.SecretVolumeSource{SecretName: secret}}})
	if d.Set.Spec.Attachment == api.Service {
		return nil
	}
	disk := vmdisk.Disk{Image: d.Set.Spec.Image, Device: api.Device, Filled: !d.needsImage()}
	return vmdisk.AddToPod(spec, []vmdisk.Disk{disk}, vmdisk.Pod{Server: server,
		Secret: secret, Claims: map[string]string{api.Device: api.ClaimName(d.Name)},
		SizeAnnotation: api.AnnotationSize, BlockSizeAnnotation: api.AnnotationBlockSize})
}

// has reports whether a pod has everything that Pod would add for its disk: then it is a copy of a
// pod that Pod has changed earlier.
func has(pod *corev1.Pod, d Wanted) bool {
	sidecar := d.Set.Spec.Attachment != api.Service
	needs, may := d.needsImage(), d.Set.Spec.Population != api.Snapshot
	name := api.ClaimName(d.Name)
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
			there[v.Name] = v.Image != nil && v.Image.Reference == d.Set.Spec.Image
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
	return Machine(pod) == "" && mounted && there[credentialVolume] && disk == sidecar &&
		there[api.DiskContainer] == sidecar && there[dataVolume] == sidecar &&
		(there[imageVolume] == (sidecar && needs) || there[imageVolume] && sidecar && may)
}

// refuse returns why a new pod cannot have its disk.
func refuse(pod *corev1.Pod, disks []Wanted) error {
	if err := strange(pod); err != nil || len(disks) == 0 {
		return err
	}
	if err := named(pod, disks); err != nil {
		return err
	}
	for _, d := range disks {
		if d.Set == nil {
			return missing(pod, d)
		}
	}
	if !has(pod, disks[0]) {
		if err := room(pod, disks); err != nil {
			return err
		}
	}
	if disks[0].Name == "" && !hasName(pod, 0) {
		return fmt.Errorf("the pod has no name yet, like those of a ReplicaSet or a Job: use a "+
			"StatefulSet, or name the disk by the annotation %s", api.AnnotationName)
	}
	for _, d := range disks {
		if len(d.Name) > api.MaxNameLength || !identityName.MatchString(d.Name) {
			return fmt.Errorf("%q cannot be the name of a VMIdentity: want at most %d characters, "+
				"a-z, 0-9, - and ., with a letter or a digit at both ends", d.Name,
				api.MaxNameLength)
		}
	}
	for _, d := range disks {
		if err := stays(pod, d.Set); err != nil {
			return err
		}
	}
	if err := images(pod, disks); err != nil {
		return err
	}
	for _, d := range disks {
		if err := d.another(); err != nil {
			return err
		}
	}
	return nil
}

// room returns why a pod has no room for its disk.
func room(pod *corev1.Pod, disks []Wanted) error {
	for _, d := range disks {
		for _, name := range d.reserved() {
			if taken(&pod.Spec, name) {
				return fmt.Errorf("the pod has a container or a volume %q already: rename it, or "+
					"remove it if it came from another pod with a disk", name)
			}
		}
	}
	if Machine(pod) != "" {
		if err := hookRoom(pod, disks); err != nil {
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

func hasName(pod *corev1.Pod, number int) bool {
	_, ours := pod.Annotations[api.Numbered(api.AnnotationName, number)]
	_, legacy := pod.Annotations[api.AnnotationNameLegacy]
	return ours || legacy && number == 0
}

// named checks the annotations.
func named(pod *corev1.Pod, disks []Wanted) error {
	for _, pair := range [][2]string{{api.AnnotationSet, api.AnnotationSetLegacy},
		{api.AnnotationName, api.AnnotationNameLegacy}} {
		ours, is := pod.Annotations[pair[0]]
		legacy, was := pod.Annotations[pair[1]]
		if is && was && ours != legacy {
			return fmt.Errorf("the annotations %s and %s differ, %q and %q: remove one of them",
				pair[0], pair[1], ours, legacy)
		}
	}
	for _, d := range disks {
		if len(d.SetName) > maxLabel {
			return fmt.Errorf("the name of VMIdentitySet %q has more than %d characters, so pods "+
				"cannot use it: make one with a shorter name", d.SetName, maxLabel)
		}
	}
	for i, d := range disks {
		if slices.ContainsFunc(disks[:i], func(e Wanted) bool { return e.Name == d.Name }) {
			return fmt.Errorf("two disks of the machine have the VMIdentity %q: give one of them "+
				"another name by the annotation %s", d.Name, d.nameIt())
		}
	}
	return nil
}

func missing(pod *corev1.Pod, d Wanted) error {
	return fmt.Errorf("there is no VMIdentitySet %q in namespace %q: make it first, or correct "+
		"the pod's annotation", d.SetName, pod.Namespace)
}

// taken reports whether a container or a volume has a name.
func taken(spec *corev1.PodSpec, name string) bool {
	return slices.ContainsFunc(slices.Concat(spec.InitContainers, spec.Containers),
		func(c corev1.Container) bool { return c.Name == name }) ||
		slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
}

// images refuses another image of the repository of a set, because the machine would run with a
// disk of another version.
func images(pod *corev1.Pod, disks []Wanted) error {
	for _, d := range disks {
		if d.Set != nil && d.Set.Spec.Image != "" && d.Set.Spec.Follow == nil {
			if err := imagesOf(pod, d.Set); err != nil {
				return err
			}
		}
	}
	return nil
}

func imagesOf(pod *corev1.Pod, set *api.VMIdentitySet) error {
	repository, digest := api.RepositoryOf(set.Spec.Image), api.DigestOf(set.Spec.Image)
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

// references are the images in a pod.
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

// Made checks a new pod after all other changes by admission.
func Made(pod *corev1.Pod, disks []Wanted) error {
	if err := named(pod, disks); err != nil {
		return err
	}
	for _, d := range disks {
		if d.Set == nil || pod.Labels[api.Numbered(api.LabelSet, d.Number)] != d.SetName {
			return missing(pod, d)
		}
	}
	for _, d := range disks {
		label := api.Numbered(api.LabelIdentity, d.Number)
		if pod.Labels[label] != d.Name {
			return fmt.Errorf("the label %s must be %q, as admission made it", label, d.Name)
		}
	}
	if len(disks) > 1 && pod.Labels[api.LabelSeveral] != several {
		return fmt.Errorf("the label %s must be %q, as admission made it", api.LabelSeveral,
			several)
	}
	for _, d := range disks {
		if !slices.Contains(pod.Spec.SchedulingGates, d.gate()) {
			return fmt.Errorf("the scheduling gate %s is missing: the pod has to wait for its disk",
				d.gate().Name)
		}
	}
	return images(pod, disks)
}

// Changed checks an update of a pod. The disks are those of the pod after it.
func Changed(before, after *corev1.Pod, disks []Wanted) error {
	annotations := []string{api.AnnotationSet, api.AnnotationSetLegacy, api.AnnotationName,
		api.AnnotationNameLegacy}
	labels := []string{api.LabelIdentity, api.LabelSet, api.LabelSeveral}
	for n := 1; n < api.MaxDisks; n++ {
		annotations = append(annotations, api.Numbered(api.AnnotationSet, n),
			api.Numbered(api.AnnotationName, n))
		labels = append(labels, api.Numbered(api.LabelIdentity, n), api.Numbered(api.LabelSet, n))
	}
	for _, key := range annotations {
		if !same(before.Annotations, after.Annotations, key) {
			return unchangeable("annotation", key)
		}
	}
	for _, key := range labels {
		if !same(before.Labels, after.Labels, key) {
			return unchangeable("label", key)
		}
	}
	if slices.Equal(references(before), references(after)) {
		return nil
	}
	return images(after, disks)
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

// another is an error if the VMIdentity of a disk exists and belongs to another set than the pod's.
func (d Wanted) another() error {
	set, identity := d.Set, d.Identity
	if identity == nil {
		return nil
	}
	advice := "name that set, or another disk by the annotation " + d.nameIt()
	// A VMIdentity that was made by hand, or restored, may belong to no set.
	if identity.Spec.SetName != "" && identity.Spec.SetName != set.Name {
		return fmt.Errorf("VMIdentity %q belongs to VMIdentitySet %q, and the pod names %q: %s",
			identity.Name, identity.Spec.SetName, set.Name, advice)
	}
	if identity.Spec.Image != set.Spec.Image && identity.Spec.FollowedTag == "" {
		return fmt.Errorf("VMIdentity %q has image %s, and VMIdentitySet %q has %s: use the "+
			"former image, or name another disk by the annotation %s", identity.Name,
			cmp.Or(identity.Spec.Image, "none"), set.Name, cmp.Or(set.Spec.Image, "none"),
			d.nameIt())
	}
	return nil
}
