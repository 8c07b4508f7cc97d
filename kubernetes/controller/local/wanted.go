package local

import (
	"fmt"
	"net"
	"strconv"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

const (
	// labelMove is on all objects that move a disk: the name of the identity.
	labelMove = v1alpha1.Group + "/move"
	// annotationFilled is on the Job that receives: the UID of the claim that it fills. Another
	// claim with that name is empty.
	annotationFilled = v1alpha1.Group + "/filled"

	dataDir    = "/data"
	secretDir  = "/etc/secret"
	secretFile = "node.session.auth.password"
	port       = 9259
	// retries is how often a pod may fail before people are told.
	retries = 3
)

// Names of the objects that move the disk of an identity. They cannot clash: the names of every
// identity's claim and pods begin with vmid-.
func moveClaim(id *v1alpha1.VMIdentity) string  { return "vmmove-" + id.Name }
func sendJob(id *v1alpha1.VMIdentity) string    { return "vmsend-" + short(id) }
func receiveJob(id *v1alpha1.VMIdentity) string { return "vmrecv-" + short(id) }

// short is the part of an identity's name that fits into the names and labels of a Job.
func short(id *v1alpha1.VMIdentity) string {
	const most = 63 - len("vmsend-") - len("-12345")
	if len(id.Name) <= most {
		return id.Name
	}
	return string(id.UID)
}

func metaOf(id *v1alpha1.VMIdentity, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: id.Namespace, Name: name,
		Labels:          map[string]string{v1alpha1.LabelIdentity: id.Name, labelMove: id.Name},
		OwnerReferences: objects.Owned("VMIdentity", id)}
}

// newClaim is the claim that the disk is copied to. class is the class of the disk's volume.
func newClaim(id *v1alpha1.VMIdentity, name, class, volume string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metaOf(id, name),
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{id.Status.Move.AccessMode},
			// "" is also a class: that of volumes without a class.
			StorageClassName: &class,
			VolumeName:       volume,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: id.Status.Move.Size}},
		}}
	if volume != "" { // the identity's own claim
		delete(c.Labels, labelMove)
		c.Annotations = map[string]string{v1alpha1.AnnotationContent: id.Spec.Content()}
		c.Finalizers = []string{v1alpha1.FinalizerDisk}
	}
	return c
}

// newSender is the Job on the node of the volume.
func newSender(id *v1alpha1.VMIdentity, image string) *batchv1.Job {
	return newJob(id, sendJob(id), image, id.Status.ClaimName,
		"send", dataDir, "--listen=:"+strconv.Itoa(port))
}

// newReceiver is the Job on the node that the disk moves to. It fills the claim with this UID.
func newReceiver(id *v1alpha1.VMIdentity, image, from string, claim types.UID) *batchv1.Job {
	job := newJob(id, receiveJob(id), image, moveClaim(id),
		"receive", "--replace", net.JoinHostPort(from, strconv.Itoa(port)), dataDir)
	job.Annotations = map[string]string{annotationFilled: string(claim)}
	job.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField,
					Operator: corev1.NodeSelectorOpIn, Values: []string{id.Status.Move.To}}}}}}}}
	return job
}

func newJob(id *v1alpha1.VMIdentity, name, image, claim string, args ...string) *batchv1.Job {
	m := metaOf(id, name)
	job := objects.Command{Args: append(args, fmt.Sprintf("--secret-file=%s/%s", secretDir,
		secretFile)), Image: image, Claim: claim, Dir: dataDir, Retries: retries}.Job(m, m.Labels)
	pod := &job.Spec.Template.Spec
	// The controller's image has another user.
	pod.SecurityContext.RunAsUser = new(int64(vmdisk.DiskUser))
	pod.SecurityContext.RunAsGroup = new(int64(vmdisk.DiskUser))
	// The nodes are fixed, even if one of them is being emptied.
	pod.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists,
		Effect: corev1.TaintEffectNoSchedule}}
	pod.Containers[0].VolumeMounts = append(pod.Containers[0].VolumeMounts,
		corev1.VolumeMount{Name: "secret", MountPath: secretDir, ReadOnly: true})
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "secret",
		VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
			SecretName: id.Status.SecretName, DefaultMode: new(int32(0o440)),
			Items: []corev1.KeyToPath{{Key: secretFile, Path: secretFile}}}}})
	return job
}
