package export

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

const (
	retries = 2
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
	case !id.Spec.Export.Flat && id.Spec.Image != "" && !id.Spec.FromAddress():
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
	e := id.Spec.Export
	return objects.Command{Args: args(id), Image: server, Claim: v1alpha1.ClaimName(id.Name),
		Dir: vmdisk.VolumeDir, Secret: e.SecretName, CA: e.RegistryCA, Retries: retries}.Job(
		metav1.ObjectMeta{Namespace: id.Namespace, Name: name, Labels: labels,
			OwnerReferences: objects.Owned("VMIdentity", id)}, labels)
}
