package vmdisk

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevirt.io/disk/libvirt"
)

// DiskUser is the user and the group of all processes of kubevirt-disk in a pod.
const DiskUser = 107

// workDir is the work directory of the container of kubevirt.io:disk.
const workDir = "/var/lib/kubevirt-disk"

// VolumeDir is the path of the disk's claim in a container, and ImageDir that of the image.
const (
	VolumeDir = "/data"
	ImageDir  = "/disk"
)

// The environment variables with the size of a container's disk, and the length of its logical
// blocks, in bytes.
const (
	EnvSize      = "SIZE"
	EnvBlockSize = "BLOCK_SIZE"
)

// Pod has the settings of the containers of a pod that serve its disks.
type Pod struct {
	// Server is the container image of kubevirt-disk that serves the disks. The image of a disk is
	// then a read-only image volume (Kubernetes 1.33 and later), of which only /disk is read: any
	// containerDisk will do, and no program in it runs. "": the image of a disk runs, and has to be
	// FROM kubevirt.io:disk.
	Server string
	// Secret is the name of the Kubernetes secret with the CHAP credential, of type
	// kubernetes.io/iscsi-chap, in the namespace of the pod.
	Secret string
	// Remote lets machines beyond the pod log in, for example a QEMU in another pod of the node.
	Remote bool
	// Claims are volume claims for the disks, by device. Writes to other disks are lost with the
	// pod.
	Claims map[string]string
	// SizeAnnotation is the annotation of the pod with the size in bytes of a disk without Size. If
	// it is not set, the size is that of the image, or of the existing disk.
	SizeAnnotation string
	// BlockSizeAnnotation is the same for disks without BlockSize.
	BlockSizeAnnotation string
	// UsageTypes are the kinds of storage that disks can choose for the guest's writes: by name,
	// the volume for the disk, such as a generic ephemeral volume of a storage class. A disk that
	// chooses none gets an emptyDir.
	UsageTypes map[string]corev1.VolumeSource
	// Resources of each container; without any: 100m of a processor and 128Mi of memory, at most
	// 512Mi.
	Resources  corev1.ResourceRequirements
	PullPolicy corev1.PullPolicy // "": Kubernetes' default
}

// AddToPod adds to a pod the containers that serve the disks, and their volumes. A virt-controller
// calls it.
//
// The containers are init containers that keep running (Kubernetes 1.29 and later). They come
// first, so the pod's own containers start when every disk can be used, and end before them. They
// fit into a namespace with the pod security standard "restricted". If a claim is used and the pod
// has no fsGroup, it becomes the group of the disks' user, so that the volume can be written. The
// API server refuses a pod that already has a container or a volume with one of the same names.
func AddToPod(spec *corev1.PodSpec, disks []Disk, p Pod) error {
	if err := check(disks, "disks"); err != nil {
		return err
	}
	var wrong problems
	if p.Secret == "" {
		wrong.add("Pod.Secret", "it is missing: want the name of the secret with the credential")
	}
	devices := make(map[string]bool)
	for _, d := range disks {
		devices[d.Device] = true
	}
	for _, device := range slices.Sorted(maps.Keys(p.Claims)) {
		if !devices[device] || p.Claims[device] == "" {
			wrong.add("Pod.Claims", "%q: want a device of the disks, and the name of a claim",
				device)
		}
	}
	for i, d := range disks {
		if d.Filled && (p.Server == "" || p.Claims[d.Device] == "") {
			wrong.add(fmt.Sprintf("disks[%d].Filled", i), "it needs Pod.Server, and the disk's "+
				"claim in Pod.Claims")
		}
		if _, known := p.UsageTypes[d.UsageType]; d.UsageType != "" && !known {
			wrong.add(fmt.Sprintf("disks[%d].copy.usage-type", i), "%q is unknown: there are %q",
				d.UsageType, slices.Sorted(maps.Keys(p.UsageTypes)))
		}
	}
	if err := wrong.err(); err != nil {
		return err
	}
	var containers []corev1.Container
	for i, d := range disks {
		c, volumes := p.container(d, i)
		containers, spec.Volumes = append(containers, c), append(spec.Volumes, volumes...)
	}
	spec.InitContainers = append(containers, spec.InitContainers...)
	if len(p.Claims) > 0 {
		if spec.SecurityContext == nil {
			spec.SecurityContext = &corev1.PodSecurityContext{}
		}
		if spec.SecurityContext.FSGroup == nil {
			spec.SecurityContext.FSGroup = new(int64(DiskUser))
			spec.SecurityContext.FSGroupChangePolicy = new(corev1.FSGroupChangeOnRootMismatch)
		}
	}
	return nil
}

// container returns the container of the disk with this place in the list, and its volumes. The
// container and its work volume have the same name.
func (p Pod) container(d Disk, place int) (corev1.Container, []corev1.Volume) {
	name := "disk-" + d.Device
	pages := "pages-" + d.Device
	host := loopback
	if p.Remote {
		host = "0.0.0.0"
	}
	portal := libvirt.Portal{Host: host, Port: uint16(firstPort + place)}
	env := []corev1.EnvVar{
		{Name: "LISTEN", Value: portal.String()},
		{Name: "METRICS_LISTEN", Value: ":" + strconv.Itoa(FirstPagesPort+place)},
		{Name: "TARGET_NAME", Value: d.targetName()},
		// The probes ask /readyz, so no ready file is needed, and no writable /tmp.
		{Name: "READY_FILE", Value: ""},
	}
	set := func(name, value string) {
		if value != "" {
			env = append(env, corev1.EnvVar{Name: name, Value: value})
		}
	}
	set("ACCESS_MODE", string(d.AccessMode))
	set("COPY_MODE", string(d.CopyMode))
	number := func(name string, value int64, annotation string) {
		if value > 0 {
			set(name, strconv.FormatInt(value, 10))
		} else if annotation != "" {
			env = append(env, corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{
				FieldRef: &corev1.ObjectFieldSelector{
					FieldPath: "metadata.annotations['" + annotation + "']"}}})
		}
	}
	number(EnvSize, d.Size, p.SizeAnnotation)
	number(EnvBlockSize, int64(d.BlockSize), p.BlockSizeAnnotation)
	mounts := []corev1.VolumeMount{{Name: name, MountPath: workDir}}
	work := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	if d.UsageType != "" {
		work = p.UsageTypes[d.UsageType]
	}
	volumes := []corev1.Volume{{Name: name, VolumeSource: *work.DeepCopy()}}
	if claim := p.Claims[d.Device]; claim != "" {
		set("PERSISTENT_DIR", VolumeDir)
		mounts = append(mounts, corev1.VolumeMount{Name: name + "-data", MountPath: VolumeDir})
		volumes = append(volumes, corev1.Volume{Name: name + "-data",
			VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
			}})
	}
	if p.Server != "" && !d.Filled {
		mounts = append(mounts, corev1.VolumeMount{Name: name + "-image", MountPath: ImageDir,
			SubPath: strings.TrimPrefix(ImageDir, "/"), ReadOnly: true})
		volumes = append(volumes, corev1.Volume{Name: name + "-image",
			VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{
				Reference: d.Image, PullPolicy: p.PullPolicy}}})
	}
	return corev1.Container{
		Name:            name,
		Image:           cmp.Or(p.Server, d.Image),
		ImagePullPolicy: p.PullPolicy,
		RestartPolicy:   new(corev1.ContainerRestartPolicyAlways),
		Env:             env,
		EnvFrom: []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: p.Secret}}}},
		Ports: []corev1.ContainerPort{
			{Name: "iscsi-" + d.Device, ContainerPort: int32(firstPort + place)},
			{Name: pages, ContainerPort: int32(FirstPagesPort + place)},
		},
		// The image is read and checked before it is served. This may take 10 minutes.
		StartupProbe:    probe("/readyz", pages, 2, 300),
		ReadinessProbe:  probe("/readyz", pages, 10, 3),
		LivenessProbe:   probe("/healthz", pages, 10, 6),
		Resources:       p.resources(),
		SecurityContext: Restricted(),
		VolumeMounts:    mounts,
	}, volumes
}

// Restricted is the security context for Kubernetes' Pod Security Standard of this name. The
// container also cannot write outside its volumes.
func Restricted() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: new(false),
		ReadOnlyRootFilesystem:   new(true),
		RunAsNonRoot:             new(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile: &corev1.SeccompProfile{
			Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

func (p Pod) resources() corev1.ResourceRequirements {
	if len(p.Resources.Limits) > 0 || len(p.Resources.Requests) > 0 {
		return *p.Resources.DeepCopy()
	}
	return corev1.ResourceRequirements{
		Requests: corev1.ResourceList{
			corev1.ResourceCPU:    resource.MustParse("100m"),
			corev1.ResourceMemory: resource.MustParse("128Mi"),
		},
		Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
	}
}

func probe(path, port string, period, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
			Path: path, Port: intstr.FromString(port)}},
		PeriodSeconds:    cmp.Or(period, 10),
		FailureThreshold: failures,
	}
}
