package export

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

const (
	diskUser    = 107
	retries     = 2
	registryDir = "/etc/registry"
	// The kubelet takes what is in this file to the status of the pod.
	digestFile = corev1.TerminationMessagePathDefault
)

// jobName is the name of the Job that does what the spec of an identity asks for.
func jobName(id *v1alpha1.VMIdentity) string {
	e := id.Spec.Export
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s\n%s\n%v", id.Name, id.UID, e.Reference,
		e.SecretName, e.Flat))
	return "vmexport-" + hex.EncodeToString(sum[:10])
}

// args are the command's. The layers of the disk's image come from its registry.
func args(id *v1alpha1.VMIdentity) []string {
	all := []string{"commit", id.Spec.Export.Reference, "--persistent-dir=" + vmdisk.VolumeDir,
		"--digest-file=" + digestFile}
	switch {
	case !id.Spec.Export.Flat && id.Spec.Image != "":
		return append(all, "--onto="+id.Spec.Image)
	case id.Spec.Image != "" && id.Spec.Population != v1alpha1.Snapshot:
		// What was not copied from the image yet comes from there.
		all = append(all, "--image="+id.Spec.Image)
	}
	return append(all, "--flat", "--base=none")
}

// newJob is the Job that commits the disk of an identity.
func newJob(id *v1alpha1.VMIdentity, server string) *batchv1.Job {
	name := jobName(id)
	labels := map[string]string{v1alpha1.LabelIdentity: id.Name, v1alpha1.LabelExport: name}
	c := corev1.Container{
		Name:  "commit",
		Image: server,
		Args:  args(id),
		// A failure is reported with the last words of the command.
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"),
				corev1.ResourceMemory: resource.MustParse("128Mi")},
			Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		},
		SecurityContext: vmdisk.Restricted(),
		VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: vmdisk.VolumeDir},
			{Name: "tmp", MountPath: "/tmp"}},
	}
	empty := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	pod := corev1.PodSpec{
		AutomountServiceAccountToken: new(false),
		EnableServiceLinks:           new(false),
		RestartPolicy:                corev1.RestartPolicyNever,
		SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: new(true),
			FSGroup:             new(int64(diskUser)),
			FSGroupChangePolicy: new(corev1.FSGroupChangeOnRootMismatch)},
		Volumes: []corev1.Volume{
			{Name: "data", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
					ClaimName: v1alpha1.ClaimName(id.Name)}}},
			{Name: "tmp", VolumeSource: empty},
		},
	}
	if secret := id.Spec.Export.SecretName; secret != "" {
		// Of a secret of another type there is nothing to mount, and the pod does not start.
		key := corev1.DockerConfigJsonKey
		c.Env = []corev1.EnvVar{{Name: "REGISTRY_CONFIG", Value: registryDir + "/" + key}}
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "registry",
			MountPath: registryDir, ReadOnly: true})
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "registry",
			VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
				SecretName: secret, DefaultMode: new(int32(0o440)),
				Items: []corev1.KeyToPath{{Key: key, Path: key}}}}})
	}
	pod.Containers = []corev1.Container{c}
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: name,
		Labels: labels, OwnerReferences: objects.Owned("VMIdentity", id)},
		Spec: batchv1.JobSpec{BackoffLimit: new(int32(retries)),
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: pod}}}
}
