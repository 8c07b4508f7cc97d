package admission

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

// HookContainer is the container of a launcher pod that serves the disk of its identity: the first
// hook sidecar. KubeVirt gives the containers their names. The others serve the further disks.
const HookContainer = "hook-sidecar-0"

// Labels and annotations that KubeVirt puts on its pods.
const (
	labelKubeVirt = "kubevirt.io" // launcherPod, on a pod in which a machine runs
	launcherPod   = "virt-launcher"
	// labelMigration is on the pod that a machine moves into.
	labelMigration = "kubevirt.io/migrationJobUID"
	// annotationProvisioning is on a pod whose only purpose is that claims get their volumes. It
	// also has all other annotations of its machine.
	annotationProvisioning = "kubevirt.io/ephemeral-provisioning"
	kubevirtGroup          = "kubevirt.io/"
	kubevirtMachine        = "VirtualMachineInstance"
)

// hookAnnotation matches annotations of a machine for its hook, which package kubevirt reads.
// KubeVirt copies them to the launcher pod.
var hookAnnotation = regexp.MustCompile(
	`^disk[.]kubevirt[.]io/(bus|boot-order|read-only|cache|serial|replace|transport)([.].+)?$`)

// Machine is the name of KubeVirt's machine in a pod; "": the pod is no launcher pod.
func Machine(pod *corev1.Pod) string {
	owner := metav1.GetControllerOf(pod)
	if pod.Labels[labelKubeVirt] != launcherPod || owner == nil || owner.Kind != kubevirtMachine ||
		!strings.HasPrefix(owner.APIVersion, kubevirtGroup) {
		return ""
	}
	return owner.Name
}

// isTarget reports whether a machine of KubeVirt will move into the pod.
func isTarget(pod *corev1.Pod) bool {
	_, target := pod.Labels[labelMigration]
	return target && Machine(pod) != ""
}

// Migrates reports whether the machine of KubeVirt in a pod will move into another one. A machine
// of the same name is not enough: it may have been made again since. Nor is a pod of an earlier
// migration, which brought the machine to its present pod.
func Migrates(into, from *corev1.Pod) bool {
	migration := into.Labels[labelMigration]
	return migration != "" && migration != from.Labels[labelMigration] &&
		Machine(into) != "" && Machine(from) != "" &&
		metav1.GetControllerOf(into).UID == metav1.GetControllerOf(from).UID
}

// provisions reports whether a pod has the annotations of a machine of KubeVirt, but does not run
// one.
func provisions(pod *corev1.Pod) bool {
	_, is := pod.Annotations[annotationProvisioning]
	return is && Machine(pod) != ""
}

// nbdDir is the directory in a hook sidecar with the certificates for a disk with attachment
// Service.
const nbdDir = "/var/run/secrets/" + api.Group + "/nbd"

// launcher gives a launcher pod everything for a hook sidecar that serves a disk, or passes it on
// from its server. The hook connects QEMU itself, so the pod needs no ports, and its own containers
// need no credential.
func launcher(spec *corev1.PodSpec, d Wanted) {
	c, set := hook(spec, d.Disk), d.Set
	env := func(name, value string) {
		c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: value})
	}
	told := func(name, annotation string) {
		c.Env = append(c.Env, corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{
				FieldPath: "metadata.annotations['" + api.Numbered(annotation, d.Number) + "']"}}})
	}
	add := func(name string, mount corev1.VolumeMount, source corev1.VolumeSource) {
		mount.Name = d.volume(name)
		c.VolumeMounts = append(c.VolumeMounts, mount)
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: mount.Name, VolumeSource: source})
	}
	if set.Spec.Attachment == api.Service {
		told("DISK", api.AnnotationDisk)
		env("DISK_TLS_CERT", nbdDir+"/"+api.KeyClientCert)
		env("DISK_TLS_KEY", nbdDir+"/"+api.KeyClientKey)
		env("DISK_SERVER_CA", nbdDir+"/"+api.KeyAuthority)
		var items []corev1.KeyToPath
		for _, key := range []string{api.KeyClientCert, api.KeyClientKey, api.KeyAuthority} {
			items = append(items, corev1.KeyToPath{Key: key, Path: key})
		}
		add(nbdVolume, corev1.VolumeMount{MountPath: nbdDir, ReadOnly: true},
			corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
				SecretName: api.NBDSecretName(d.Name), Items: items}})
		return
	}
	told(vmdisk.EnvSize, api.AnnotationSize)
	told(vmdisk.EnvBlockSize, api.AnnotationBlockSize)
	env("PERSISTENT_DIR", vmdisk.VolumeDir)
	add(dataVolume, corev1.VolumeMount{MountPath: vmdisk.VolumeDir},
		corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
			ClaimName: api.ClaimName(d.Name)}})
	if d.needsImage() {
		add(imageVolume, corev1.VolumeMount{MountPath: vmdisk.ImageDir,
			SubPath: strings.TrimPrefix(vmdisk.ImageDir, "/"), ReadOnly: true},
			corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: set.Spec.Image}})
	}
}

// Hook is the container of a launcher pod that serves a disk, or nil if none does.
func Hook(pod *corev1.Pod, number int) *corev1.Container {
	d := Disk{Number: number}
	c := hook(&pod.Spec, d)
	if Machine(pod) == "" || c == nil ||
		!slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.Name == d.volume(dataVolume)
		}) {
		return nil
	}
	return c
}

// hook is the hook sidecar for a disk, or nil if the pod has no such container.
func hook(spec *corev1.PodSpec, d Disk) *corev1.Container {
	for i := range spec.Containers {
		if spec.Containers[i].Name == d.container() {
			return &spec.Containers[i]
		}
	}
	return nil
}

func hookRoom(pod *corev1.Pod, disks []Wanted) error {
	for _, d := range disks {
		if hook(&pod.Spec, d.Disk) == nil {
			return fmt.Errorf("the machine has no hook sidecar that could serve its disk: name an "+
				"image of kubevirt-disk in its annotation hooks.kubevirt.io/hookSidecars, so that "+
				"the pod has the container %s", d.container())
		}
	}
	for _, d := range disks {
		for _, m := range hook(&pod.Spec, d.Disk).VolumeMounts {
			if m.MountPath == vmdisk.VolumeDir || m.MountPath == vmdisk.ImageDir {
				return fmt.Errorf("container %q mounts a volume on %s, where its VMIdentity will "+
					"be: remove it from the annotation hooks.kubevirt.io/hookSidecars of the "+
					"machine", d.container(), m.MountPath)
			}
		}
	}
	return nil
}

// stays returns why a machine of KubeVirt cannot move into a pod.
func stays(pod *corev1.Pod, set *api.VMIdentitySet) error {
	if !isTarget(pod) || set.Spec.Attachment == api.Service {
		return nil
	}
	return fmt.Errorf("the disk of VMIdentitySet %q is in the pod that the machine runs in, so "+
		"the machine cannot be migrated: stop it and start it again, or give it a set with "+
		"attachment Service", set.Name)
}
