package objects

import (
	"cmp"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

// Command is one command of kubevirt-disk for the disk in a claim. A Job runs it as a user without
// rights and without an account.
type Command struct {
	Args []string
	// Image is the image of kubevirt-disk.
	Image string
	// Claim is the claim with the disk. Its file system is at Dir, or its block device at Device.
	Claim, Dir, Device string
	// Secret has the registry's credential (kubernetes.io/dockerconfigjson); "": none.
	Secret string
	// CA has certificates that are trusted in addition to the usual ones; nil: none.
	CA *v1alpha1.ConfigMapKey
	// Retries is how often a pod may fail before the Job has failed.
	Retries int32
}

const (
	registryDir = "/etc/registry"
	caDir       = "/etc/registry-ca"
	caFile      = "ca.crt"
)

// Job is the Job, with the labels of its pods.
func (c Command) Job(m metav1.ObjectMeta, pods map[string]string) *batchv1.Job {
	var args []string
	for _, a := range c.Args { // Kubernetes replaces $(NAME), and $$ by $
		args = append(args, strings.ReplaceAll(a, "$", "$$"))
	}
	container := corev1.Container{
		Name:  c.Args[0],
		Image: c.Image,
		Args:  args,
		// A failure is reported with the last words of the command.
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"),
				corev1.ResourceMemory: resource.MustParse("128Mi")},
			Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		},
		SecurityContext: vmdisk.Restricted(),
		VolumeMounts:    []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}},
	}
	if c.Device != "" {
		container.VolumeDevices = []corev1.VolumeDevice{{Name: "data", DevicePath: c.Device}}
	} else {
		container.VolumeMounts = append(container.VolumeMounts,
			corev1.VolumeMount{Name: "data", MountPath: c.Dir})
	}
	pod := corev1.PodSpec{
		AutomountServiceAccountToken: new(false),
		EnableServiceLinks:           new(false),
		RestartPolicy:                corev1.RestartPolicyNever,
		SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: new(true),
			FSGroup:             new(int64(vmdisk.DiskUser)),
			FSGroupChangePolicy: new(corev1.FSGroupChangeOnRootMismatch)},
		Volumes: []corev1.Volume{
			{Name: "data", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
					ClaimName: c.Claim}}},
			{Name: "tmp", VolumeSource: corev1.VolumeSource{
				EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		},
	}
	file := func(env, volume, dir, name string, source corev1.VolumeSource) {
		container.Env = append(container.Env, corev1.EnvVar{Name: env, Value: dir + "/" + name})
		container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: volume,
			MountPath: dir, ReadOnly: true})
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: volume, VolumeSource: source})
	}
	if c.Secret != "" {
		// A secret of another type does not have this key, and the pod does not start.
		key := corev1.DockerConfigJsonKey
		file("REGISTRY_CONFIG", "registry", registryDir, key, corev1.VolumeSource{
			Secret: &corev1.SecretVolumeSource{SecretName: c.Secret,
				DefaultMode: new(int32(0o440)), Items: []corev1.KeyToPath{{Key: key, Path: key}}}})
	}
	if c.CA != nil {
		file("REGISTRY_CA", "registry-ca", caDir, caFile, corev1.VolumeSource{
			ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: string(c.CA.Name)},
				Items: []corev1.KeyToPath{{Key: cmp.Or(c.CA.Key, caFile),
					Path: caFile}}}})
	}
	pod.Containers = []corev1.Container{container}
	return &batchv1.Job{ObjectMeta: m, Spec: batchv1.JobSpec{BackoffLimit: new(c.Retries),
		// A pod that is ending may still write while its node is lost.
		PodReplacementPolicy: new(batchv1.Failed),
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pods},
			Spec: pod}}}
}
