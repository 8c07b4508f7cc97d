package fill

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

const (
	// labelFill is on the Job that fills a claim, and on its pods: the name of the Job.
	labelFill = v1alpha1.Group + "/fill"
	// annotationImage is on the Job and on the claim that is filled: the name of the VMImage.
	annotationImage = v1alpha1.Group + "/vm-image"
	// annotationWanted is on the Job: a digest of its purpose, which includes the claim that it
	// fills. Another claim with that name is empty.
	annotationWanted = v1alpha1.Group + "/content"
	// annotationKeys is on the Job's pods: public keys, which a volume of the downward API mounts.
	// The annotations of our group are for pods with an identity.
	annotationKeys = "verify-keys"

	retries = 4
	port    = 9262

	dataDir  = "/data"
	diskFile = dataDir + "/disk.img"
	device   = "/dev/vm-image"
	keysDir  = "/etc/verify-keys"
	keysFile = "keys.pem"
)

// nameOf is the name of the objects that fill a claim.
func nameOf(claim *corev1.PersistentVolumeClaim) string { return "vmfill-" + string(claim.UID) }

// imageOf is the name of the VMImage that is the source of a claim, or "".
func imageOf(claim *corev1.PersistentVolumeClaim) string {
	ref := claim.Spec.DataSourceRef
	if ref == nil || ref.APIGroup == nil || *ref.APIGroup != v1alpha1.Group ||
		ref.Kind != "VMImage" || ref.Namespace != nil && *ref.Namespace != claim.Namespace {
		return ""
	}
	return ref.Name
}

// metaOf is the metadata of the objects that fill a claim. With the empty LabelIdentity, a Job is
// in the cache.
func metaOf(claim *corev1.PersistentVolumeClaim) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: claim.Namespace, Name: nameOf(claim),
		Labels:      map[string]string{v1alpha1.LabelIdentity: "", labelFill: nameOf(claim)},
		Annotations: map[string]string{annotationImage: imageOf(claim)},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "PersistentVolumeClaim",
			Name: claim.Name, UID: claim.UID, Controller: new(true)}}}
}

// newClaim is the claim whose volume is filled.
func newClaim(claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
	m := metaOf(claim)
	if node := claim.Annotations[annotationNode]; node != "" {
		m.Annotations[annotationNode] = node
	}
	from := claim.Spec
	return &corev1.PersistentVolumeClaim{ObjectMeta: m, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: from.AccessModes, StorageClassName: from.StorageClassName,
		VolumeMode: from.VolumeMode, Selector: from.Selector,
		VolumeAttributesClassName: from.VolumeAttributesClassName,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
			corev1.ResourceStorage: from.Resources.Requests[corev1.ResourceStorage]}}}}
}

func isBlock(claim *corev1.PersistentVolumeClaim) bool {
	mode := claim.Spec.VolumeMode
	return mode != nil && *mode == corev1.PersistentVolumeBlock
}

// sizeIn is the size in bytes of a disk that fills the file system of a claim: it leaves as much to
// the file system as CDI by default, and is in whole MiB.
func sizeIn(claim *corev1.PersistentVolumeClaim) int64 {
	request := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	const overhead, unit = 0.06, 1 << 20
	return int64(float64(request.Value())*(1-overhead)) / unit * unit
}

// args are the arguments of the command that fetches a disk.
func args(image *v1alpha1.VMImage, claim *corev1.PersistentVolumeClaim) []string {
	// An earlier try may have left a file.
	all := []string{"pull", "--force", "--digest-file=" + corev1.TerminationMessagePathDefault,
		fmt.Sprintf("--progress-listen=:%d", port)}
	if image.Spec.Path != "" {
		all = append(all, "--path="+image.Spec.Path)
	}
	if len(image.Spec.Keys) > 0 {
		all = append(all, "--verify-key="+keysDir+"/"+keysFile)
	}
	if isBlock(claim) {
		return append(all, image.Spec.Image, device)
	}
	if size := sizeIn(claim); size > 0 {
		all = append(all, fmt.Sprintf("--size=%d", size))
	}
	return append(all, image.Spec.Image, diskFile)
}

// newJob is the Job that fills a claim by way of another claim with the UID filled.
func newJob(image *v1alpha1.VMImage, claim *corev1.PersistentVolumeClaim, filled types.UID,
	server string) *batchv1.Job {
	m := metaOf(claim)
	m.Annotations[annotationWanted] = contentDigest(image, claim, filled, server)
	c := objects.Command{Args: args(image, claim), Image: server, Claim: nameOf(claim),
		Dir: dataDir, Secret: image.Spec.SecretName, CA: image.Spec.RegistryCA, Retries: retries}
	if isBlock(claim) {
		c.Dir, c.Device = "", device
	}
	job := c.Job(m, map[string]string{labelFill: m.Name})
	if len(image.Spec.Keys) > 0 {
		pod := &job.Spec.Template
		pod.Annotations = map[string]string{annotationKeys: strings.Join(image.Spec.Keys, "\n")}
		pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts,
			corev1.VolumeMount{Name: "verify-keys", MountPath: keysDir, ReadOnly: true})
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "verify-keys",
			VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{
				Items: []corev1.DownwardAPIVolumeFile{{Path: keysFile,
					FieldRef: &corev1.ObjectFieldSelector{
						FieldPath: "metadata.annotations['" + annotationKeys + "']"}}}}}})
	}
	return job
}

// contentDigest is a digest of the purpose of a Job.
func contentDigest(image *v1alpha1.VMImage, claim *corev1.PersistentVolumeClaim, filled types.UID,
	server string) string {
	text := fmt.Appendf(nil, "%q\n%q\n%q\n%q\n%q", args(image, claim), filled, server,
		image.Spec.SecretName, image.Spec.Keys)
	if ca := image.Spec.RegistryCA; ca != nil {
		text = fmt.Appendf(text, "\n%q\n%q", ca.Name, ca.Key)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// strip removes everything but the name from a claim that this package does not need: the cache has
// all claims of the cluster.
func strip(object any) (any, error) {
	claim, ok := object.(*corev1.PersistentVolumeClaim)
	if !ok {
		return object, nil
	}
	claim.ManagedFields = nil
	if imageOf(claim) == "" && !strings.HasPrefix(claim.Name, "vmfill-") {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
			Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			ResourceVersion: claim.ResourceVersion}}, nil
	}
	maps.DeleteFunc(claim.Annotations, func(key, _ string) bool {
		return key != annotationNode && key != annotationImage
	})
	return claim, nil
}
