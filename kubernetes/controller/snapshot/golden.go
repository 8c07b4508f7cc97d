package snapshot

import (
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

const (
	// labelGolden is on all golden objects.
	labelGolden = v1alpha1.Group + "/golden"
	// annotationImage is on golden objects, for people: the image.
	annotationImage = v1alpha1.Group + "/image"

	dataDir  = "/data"
	diskFile = dataDir + "/disk.img"
	retries  = 3
)

// metaOf is the metadata of an object that belongs to a golden Job. With the empty LabelIdentity,
// the object is in the cache.
func metaOf(id *v1alpha1.VMIdentity, name string, owner metav1.OwnerReference) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: id.Namespace, Name: name,
		Labels:          map[string]string{labelGolden: name, v1alpha1.LabelIdentity: ""},
		Annotations:     map[string]string{annotationImage: id.Spec.Image},
		OwnerReferences: []metav1.OwnerReference{owner}}
}

// ownedBy is a reference to an identity that uses golden objects. There are several such owners, so
// none of them is the controller.
func ownedBy(id *v1alpha1.VMIdentity) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: v1alpha1.GroupVersion.String(), Kind: "VMIdentity",
		Name: id.Name, UID: id.UID}
}

func ofJob(job *batchv1.Job) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: batchv1.SchemeGroupVersion.String(), Kind: "Job",
		Name: job.Name, UID: job.UID, Controller: new(true)}
}

// newJob is a Job that writes an image into the claim of its name.
func newJob(id *v1alpha1.VMIdentity, name string, o objects.Options) *batchv1.Job {
	var ca *v1alpha1.ConfigMapKey
	if o.PullCA != "" {
		ca = &v1alpha1.ConfigMapKey{Name: v1alpha1.SourceName(o.PullCA)}
	}
	return objects.Command{
		// An earlier attempt may have left a file that differs.
		Args:  []string{"pull", "--force", id.Spec.Image, diskFile},
		Image: o.Server, Claim: name, Dir: dataDir, Secret: o.PullSecret, CA: ca,
		Retries: retries,
	}.Job(metaOf(id, name, ownedBy(id)), map[string]string{labelGolden: name})
}

func newClaim(id *v1alpha1.VMIdentity, job *batchv1.Job, class *string,
	size resource.Quantity) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metaOf(id, job.Name, ofJob(job)),
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			StorageClassName: class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: size}},
		}}
}

func newSnapshot(id *v1alpha1.VMIdentity, job *batchv1.Job,
	class string) *unstructured.Unstructured {
	return newVolumeSnapshot(metaOf(id, job.Name, ofJob(job)), job.Name, class)
}

func newVolumeSnapshot(m metav1.ObjectMeta, claim, class string) *unstructured.Unstructured {
	spec := map[string]any{"source": map[string]any{"persistentVolumeClaimName": claim}}
	if class != "" {
		spec["volumeSnapshotClassName"] = class
	}
	s := source.NewSnapshot()
	s.Object["spec"] = spec
	s.SetNamespace(m.Namespace)
	s.SetName(m.Name)
	s.SetLabels(m.Labels)
	s.SetAnnotations(m.Annotations)
	s.SetOwnerReferences(m.OwnerReferences)
	return s
}
