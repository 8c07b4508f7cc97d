package service

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

const (
	iscsiPort = 3260
	lun       = 1

	// The file of the downward API from which the daemon learns of handovers.
	podinfo     = "podinfo"
	podinfoDir  = "/etc/podinfo"
	annotations = "annotations"

	// The volume with the certificates for NBD, its path, and the name of the port.
	nbdVolume = "nbd"
	nbdDir    = "/etc/nbd"
	nbdPort   = "nbd-" + v1alpha1.Device
)

// Name is the name of an identity's Deployment.
func Name(identity string) string { return v1alpha1.ClaimName(identity) }

// serviceName is the name of an identity's Service. It is a DNS label, so it has no dots: if the
// identity's name has some, a hash makes the name unique.
func serviceName(identity string) string {
	name := v1alpha1.ClaimName(identity)
	if !strings.Contains(name, ".") {
		return name
	}
	const length = 8
	sum := sha256.Sum256([]byte(name))
	name = strings.ReplaceAll(name, ".", "-")
	return strings.TrimRight(name[:min(len(name), maxLabel-length-1)], "-") + "-" +
		hex.EncodeToString(sum[:])[:length]
}

// maxLabel is the longest label of DNS, in bytes.
const maxLabel = 63

// targetName is the IQN of the disk. It is different for each identity, because an initiator takes
// two portals with one name for two paths to one disk.
func targetName(id *v1alpha1.VMIdentity) string {
	return fmt.Sprintf("iqn.2017-01.io.kubevirt:%s.%s", id.Namespace, id.Name)
}

func selector(id *v1alpha1.VMIdentity) map[string]string {
	return map[string]string{v1alpha1.LabelServer: id.Name}
}

func newService(id *v1alpha1.VMIdentity) *corev1.Service {
	m := objects.MetaOf(id, serviceName(id.Name))
	return &corev1.Service{ObjectMeta: m, Spec: corev1.ServiceSpec{
		Selector: selector(id),
		Ports: []corev1.ServicePort{
			{Name: "iscsi", Port: iscsiPort, Protocol: corev1.ProtocolTCP,
				TargetPort: intstr.FromString("iscsi-" + v1alpha1.Device)},
			{Name: "nbd", Port: v1alpha1.PortNBD, Protocol: corev1.ProtocolTCP,
				TargetPort: intstr.FromString(nbdPort)}},
	}}
}

// host is the name of an identity's Service in the cluster.
func host(id *v1alpha1.VMIdentity) string {
	return fmt.Sprintf("%s.%s.svc", serviceName(id.Name), id.Namespace)
}

// hasImage reports whether the server of a Deployment has the disk's image as a volume.
func hasImage(d *appsv1.Deployment) bool {
	return slices.ContainsFunc(d.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool {
		return v.Image != nil
	})
}

// serveNBD makes a server's container serve by NBD, with the identity's certificates.
func serveNBD(id *v1alpha1.VMIdentity, pod *corev1.PodSpec, c *corev1.Container) {
	file := func(key string) string { return nbdDir + "/" + key }
	c.Env = append(c.Env,
		corev1.EnvVar{Name: "NBD_LISTEN", Value: fmt.Sprintf("0.0.0.0:%d", v1alpha1.PortNBD)},
		corev1.EnvVar{Name: "NBD_TLS_CERT", Value: file(corev1.TLSCertKey)},
		corev1.EnvVar{Name: "NBD_TLS_KEY", Value: file(corev1.TLSPrivateKeyKey)},
		corev1.EnvVar{Name: "NBD_CLIENT_CA", Value: file(v1alpha1.KeyAuthority)})
	c.Ports = append(c.Ports, corev1.ContainerPort{Name: nbdPort, ContainerPort: v1alpha1.PortNBD})
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: nbdVolume, MountPath: nbdDir,
		ReadOnly: true})
	var items []corev1.KeyToPath
	for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey,
		v1alpha1.KeyAuthority} {
		items = append(items, corev1.KeyToPath{Key: key, Path: key})
	}
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: nbdVolume,
		VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
			SecretName: v1alpha1.NBDSecretName(id.Name), Items: items}}})
}

// newDeployment is the Deployment of an identity whose claim and secret exist.
func newDeployment(id *v1alpha1.VMIdentity, server string, image bool) (*appsv1.Deployment, error) {
	disk := vmdisk.Disk{Image: id.Spec.Image, Device: v1alpha1.Device, Size: id.Spec.Bytes(),
		BlockSize: int(id.Spec.BlockSize), Filled: !image}
	pod := corev1.PodSpec{
		AutomountServiceAccountToken:  new(false),
		EnableServiceLinks:            new(false),
		TerminationGracePeriodSeconds: new(int64(30)),
		SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: new(true),
			SeccompProfile: &corev1.SeccompProfile{
				Type: corev1.SeccompProfileTypeRuntimeDefault}},
	}
	if err := vmdisk.AddToPod(&pod, []vmdisk.Disk{disk}, vmdisk.Pod{
		Server: server, Secret: id.Status.SecretName, Remote: true,
		Claims: map[string]string{v1alpha1.Device: id.Status.ClaimName},
	}); err != nil {
		return nil, err
	}
	// It is the only container in the pod, so it need not start first.
	c := pod.InitContainers[0]
	pod.InitContainers = nil
	c.RestartPolicy = nil
	for i := range c.Env {
		if c.Env[i].Name == "TARGET_NAME" {
			c.Env[i].Value = targetName(id)
		}
	}
	c.Env = append(c.Env,
		corev1.EnvVar{Name: "POD_ANNOTATIONS", Value: podinfoDir + "/" + annotations},
		// The daemon does not know the Service's address.
		corev1.EnvVar{Name: "BEHIND_NAT", Value: "true"})
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: podinfo,
		MountPath: podinfoDir, ReadOnly: true})
	serveNBD(id, &pod, &c)
	pod.Containers = []corev1.Container{c}
	file := corev1.DownwardAPIVolumeFile{Path: annotations, FieldRef: &corev1.ObjectFieldSelector{
		APIVersion: "v1", FieldPath: "metadata.annotations"}}
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: podinfo,
		VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{
			Items: []corev1.DownwardAPIVolumeFile{file}}}})
	labels := selector(id)
	// This label marks the pods that have the claim.
	labels[v1alpha1.LabelIdentity] = id.Name
	m := objects.MetaOf(id, Name(id.Name))
	return &appsv1.Deployment{ObjectMeta: m, Spec: appsv1.DeploymentSpec{
		Replicas: new(int32(1)),
		// Pods do not share a disk: after a change, one ends before the next one starts. If a pod
		// is deleted, Kubernetes makes another at once, which finds the disk locked.
		Strategy: appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType},
		Selector: &metav1.LabelSelector{MatchLabels: selector(id)},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: map[string]string{
				"prometheus.io/scrape": "true",
				"prometheus.io/port":   fmt.Sprint(objects.PagesPort(&pod)),
				"prometheus.io/path":   "/metrics",
			}},
			Spec: pod,
		},
	}}, nil
}

// serverOf returns the image of the server in a Deployment, or "".
func serverOf(d *appsv1.Deployment) string {
	if len(d.Spec.Template.Spec.Containers) == 0 {
		return ""
	}
	return d.Spec.Template.Spec.Containers[0].Image
}
