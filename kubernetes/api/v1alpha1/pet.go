package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// VMPet is one machine with a disk that stays. It makes a VMIdentitySet and a StatefulSet of one
// pod, both with its name.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=vmpet
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 52",message="the name may have at most 52 characters, as the names of the pod and of its labels are made from it"
// +kubebuilder:validation:XValidation:rule="!self.metadata.name.contains('.')",message="the name may have no dots, as the name of the pod is made from it, and is also its host name"
// +kubebuilder:printcolumn:name=Running,type=boolean,JSONPath=`.spec.running`
// +kubebuilder:printcolumn:name=Ready,type=boolean,JSONPath=`.status.ready`
// +kubebuilder:printcolumn:name=Reason,type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
type VMPet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec VMPetSpec `json:"spec"`
	// A reader of a pet that the controller has not seen yet finds it not ready.
	// +kubebuilder:default={ready: false}
	Status VMPetStatus `json:"status,omitempty"`
}

// VMPetSpec describes the machine.
type VMPetSpec struct {
	// disk is the spec of the VMIdentitySet.
	// +kubebuilder:validation:XValidation:rule="self.attachment == oldSelf.attachment",message="attachment is immutable: make another VMPet"
	// +kubebuilder:validation:XValidation:rule="!has(self.image) || !has(oldSelf.image) || self.image == oldSelf.image",message="image is immutable: make another VMPet"
	Disk DiskSpec `json:"disk"`
	// running says whether the machine's pod exists. Its disk stays either way.
	// +kubebuilder:default=true
	// +optional
	Running *bool `json:"running,omitempty"`
	// template is the PodTemplateSpec of the StatefulSet. The API server checks it when the
	// StatefulSet is made, so it is not checked here.
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:XPreserveUnknownFields
	// +kubebuilder:pruning:PreserveUnknownFields
	Template runtime.RawExtension `json:"template"`
}

// VMPetStatus is the state that the controller has seen.
type VMPetStatus struct {
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// ready is true when the machine's pod is ready, like condition Ready.
	// +optional
	Ready bool `json:"ready"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// VMPetList is a list of VMPet.
//
// +kubebuilder:object:root=true
type VMPetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VMPet `json:"items"`
}
