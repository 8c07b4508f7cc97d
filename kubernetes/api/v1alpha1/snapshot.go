package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// VMIdentitySnapshot is the disk of a VMIdentity as it was at one point in time. It stays when the
// VMIdentity goes.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=vmidsnap
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 246",message="the name may have at most 246 characters, as that of the VolumeSnapshot is made from it"
// +kubebuilder:printcolumn:name=Ready,type=boolean,JSONPath=`.status.readyToUse`
// +kubebuilder:printcolumn:name=Identity,type=string,JSONPath=`.spec.identityName`
// +kubebuilder:printcolumn:name=Size,type=string,JSONPath=`.status.restoreSize`
// +kubebuilder:printcolumn:name=Taken,type=date,JSONPath=`.status.creationTime`
// +kubebuilder:printcolumn:name=Reason,type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
type VMIdentitySnapshot struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec VMIdentitySnapshotSpec `json:"spec"`
	// A reader of a snapshot that the controller has not seen yet finds it not ready.
	// +kubebuilder:default={readyToUse: false}
	Status VMIdentitySnapshotStatus `json:"status,omitempty"`
}

// VMIdentitySnapshotSpec says of what the snapshot is.
type VMIdentitySnapshotSpec struct {
	// identityName is the VMIdentity of the namespace whose disk is kept.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentitySnapshot"
	IdentityName SourceName `json:"identityName"`
}

// VMIdentitySnapshotStatus is the state that the controller has seen. Most fields are those of a
// VolumeSnapshot.
type VMIdentitySnapshotStatus struct {
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// readyToUse is true when a VMIdentity can begin from the snapshot, like condition Ready.
	// +optional
	ReadyToUse bool `json:"readyToUse"`
	// creationTime is the point in time.
	// +optional
	CreationTime *metav1.Time `json:"creationTime,omitempty"`
	// restoreSize is the smallest size of a claim that is made from the snapshot.
	// +optional
	RestoreSize *resource.Quantity `json:"restoreSize,omitempty"`
	// error is what the driver of the storage says last.
	// +optional
	Error *SnapshotError `json:"error,omitempty"`
	// volumeSnapshotName is the VolumeSnapshot with the data.
	// +optional
	VolumeSnapshotName string `json:"volumeSnapshotName,omitempty"`
	// disk is what the VMIdentity was when the snapshot was asked for. A VMIdentity that begins
	// from it has the same image, population and block size. +optional
	Disk *SnapshotDisk `json:"disk,omitempty"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SnapshotError is an error of a driver.
type SnapshotError struct {
	// +optional
	Time metav1.Time `json:"time,omitempty"`
	// +optional
	Message string `json:"message,omitempty"`
}

// SnapshotDisk is what a disk was made as.
type SnapshotDisk struct {
	// +optional
	Image string `json:"image,omitempty"`
	// +optional
	Population Population `json:"population,omitempty"`
	// blockSize is that of the VMIdentity, if it had one.
	// +optional
	BlockSize int32 `json:"blockSize,omitempty"`
	// size is spec.size of the VMIdentity, if it had one.
	// +optional
	Size *resource.Quantity `json:"size,omitempty"`
}

// VMIdentitySnapshotList is a list of VMIdentitySnapshot.
//
// +kubebuilder:object:root=true
type VMIdentitySnapshotList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VMIdentitySnapshot `json:"items"`
}
