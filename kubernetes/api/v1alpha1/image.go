package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// VMImage is a disk that fills claims. A PersistentVolumeClaim of the namespace names it as its
// dataSourceRef, and begins with its content.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=vmimg
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name=Image,type=string,JSONPath=`.spec.image`
// +kubebuilder:printcolumn:name=Claims,type=string,JSONPath=`.status.claims[*].name`
// +kubebuilder:printcolumn:name=Progress,type=string,JSONPath=`.status.claims[*].progress`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
type VMImage struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec VMImageSpec `json:"spec"`
	// +optional
	Status VMImageStatus `json:"status,omitempty"`
}

// VMImageSpec says where the disk is, and what is believed of it. A claim that is being filled when
// the spec changes is filled anew.
type VMImageSpec struct {
	// image is what `kubevirt-disk pull` takes: the reference of an image in a registry, best by
	// its digest, or else the address of a file.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-zA-Z0-9][^\\\\s]*$')",message="must be the reference of an image, or an address"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^(oci|oci-archive|docker-archive):')",message="must be in a registry or at an address: the pod has no files"
	Image string `json:"image"`
	// path is the file in the image, if it has several disks: a name in /disk, or a path.
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Path string `json:"path,omitempty"`
	// secretName is a secret of the namespace with the registry's credential
	// (kubernetes.io/dockerconfigjson).
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^vmimage-[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",message="must begin with vmimage-, so that no other secret of the namespace is used: kubectl create secret docker-registry vmimage-..."
	// +optional
	SecretName string `json:"secretName,omitempty"`
	// registryCA is a key of a ConfigMap of the namespace with certificates (PEM) that are trusted
	// beside the usual ones.
	// +optional
	RegistryCA *ConfigMapKey `json:"registryCA,omitempty"`
	// keys are public keys (PEM), as cosign's. If there are any, the image must be signed by one.
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=4096
	// +kubebuilder:validation:items:MinLength=1
	// +listType=atomic
	// +optional
	Keys []string `json:"keys,omitempty"`
}

// VMImageStatus is the state that the controller has seen.
type VMImageStatus struct {
	// claims are those that wait for the content, or are being filled. One that is filled is not
	// in the list any more; an event of the claim says so.
	// +listType=map
	// +listMapKey=name
	// +optional
	Claims []ClaimStatus `json:"claims,omitempty"`
}

// ClaimStatus says how far a claim is.
type ClaimStatus struct {
	Name string    `json:"name"`
	UID  types.UID `json:"uid"`
	// reason is Filling, Waiting, FillFailed or another one that a machine can read.
	Reason string `json:"reason"`
	// message is for people.
	Message string `json:"message"`
	// progress is how much of what is fetched has come, as 42%. It is not there before that is
	// known.
	// +optional
	Progress string `json:"progress,omitempty"`
}

// VMImageList is a list of VMImage.
//
// +kubebuilder:object:root=true
type VMImageList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VMImage `json:"items"`
}
