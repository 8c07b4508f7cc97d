package export

import (
	"cmp"
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
	caDir       = "/etc/registry-ca"
	caFile      = "ca.crt"
	// The kubelet takes what is in this file to the status of the pod.
	digestFile = corev1.TerminationMessagePathDefault
)

// jobName is the name of the Job that does what the spec of an identity asks for.
func jobName(id *v1alpha1.VMIdentity) string {
	e := id.Spec.Export
	text := fmt.Appendf(nil, "%s\n%s\n%s\n%s\n%v", id.Name, id.UID, e.Reference, e.SecretName,
		e.Flat)
	if e.RegistryCA != nil { // as earlier versions name the others
		text = fmt.Appendf(text, "\n%s\n%s", e.RegistryCA.Name, e.RegistryCA.Key)
	}
	sum := sha256.Sum256(text)
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
	file := func(env, volume, dir, name string, source corev1.VolumeSource) {
		c.Env = append(c.Env, corev1.EnvVar{Name: env, Value: dir + "/" + name})
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: dir,
			ReadOnly: true})
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: volume, VolumeSource: source})
	}
	if secret := id.Spec.Export.SecretName; secret != "" {
		// Of a secret of another type there is nothing to mount, and the pod does not start.
		key := corev1.DockerConfigJsonKey
		file("REGISTRY_CONFIG", "registry", registryDir, key, corev1.VolumeSource{
			Secret: &corev1.SecretVolumeSource{SecretName: secret, DefaultMode: new(int32(0o440)),
				Items: []corev1.KeyToPath{{Key: key, Path: key}}}})
	}
	if ca := id.Spec.Export.RegistryCA; ca != nil {
		from := &corev1.ConfigMapVolumeSource{
			Items: []corev1.KeyToPath{{Key: cmp.Or(ca.Key, caFile), Path: caFile}}}
		from.Name = string(ca.Name)
		file("REGISTRY_CA", "registry-ca", caDir, caFile, corev1.VolumeSource{ConfigMap: from})
	}
	pod.Containers = []corev1.Container{c}
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: name,
		Labels: labels, OwnerReferences: objects.Owned("VMIdentity", id)},
		Spec: batchv1.JobSpec{BackoffLimit: new(int32(retries)),
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: pod}}}
}
