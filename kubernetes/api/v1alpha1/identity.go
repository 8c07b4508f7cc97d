package v1alpha1

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Type is where the disk of an identity lives.
// +kubebuilder:validation:Enum=Local;PersistentVolume
type Type string

const (
	// Local is a volume on one node. Pods that use it are scheduled there.
	Local Type = "Local"
	// PersistentVolume is a volume of any storage class; Kubernetes brings it to the pod.
	PersistentVolume Type = "PersistentVolume"
)

// Population is how the image gets into a claim.
// +kubebuilder:validation:Enum=Overlay;Snapshot
type Population string

const (
	// Overlay keeps the guest's writes in the claim, above the image, and copies the image into it
	// while the guest runs. The image is needed until the identity is Hydrated.
	Overlay Population = "Overlay"
	// Snapshot fills one claim for each image, storage class and namespace, takes a VolumeSnapshot
	// of it, and makes the claims of identities from that. With a source, they are made from that.
	Snapshot Population = "Snapshot"
)

// Attachment is how a machine reaches its disk.
// +kubebuilder:validation:Enum=Sidecar;Service
type Attachment string

const (
	// Sidecar serves the disk from a container of the machine's own pod.
	Sidecar Attachment = "Sidecar"
	// Service serves the disk from a Deployment of its own behind a Service, so that two machines
	// can reach it while one is migrated to the other.
	Service Attachment = "Service"
)

// FirmwareUUIDPolicy is how many machines firmwareUUID is for.
// +kubebuilder:validation:Enum=Fixed;PerPod
type FirmwareUUIDPolicy string

const (
	// Fixed is one machine at a time, with exactly this SMBIOS UUID. It is the default.
	Fixed FirmwareUUIDPolicy = "Fixed"
	// PerPod gives each identity a UUID of its own: version 5 (RFC 9562, section 5.5) of
	// firmwareUUID and the name of the identity.
	PerPod FirmwareUUIDPolicy = "PerPod"
)

// DiskSpec describes the disks of a VMIdentitySet. Each VMIdentity has a copy.
//
// +kubebuilder:validation:XValidation:rule="self.type == 'PersistentVolume' || !has(self.population) || self.population == 'Overlay'",message="Local disks have no snapshots: population must be Overlay"
// +kubebuilder:validation:XValidation:rule="has(self.firmwareUUID) || !has(self.firmwareUUIDPolicy)",message="firmwareUUIDPolicy needs firmwareUUID"
// +kubebuilder:validation:XValidation:rule="!has(self.usageType) || !has(self.storageClassName)",message="usageType and storageClassName both name a storage class: set one of them"
// +kubebuilder:validation:XValidation:rule="self.type == 'PersistentVolume' || !has(self.attachment) || self.attachment == 'Sidecar'",message="Local disks are served in the pod: attachment must be Sidecar"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.size) || has(self.size)",message="size may only grow: it cannot be removed"
// +kubebuilder:validation:XValidation:rule="has(self.image) || has(self.source)",message="name the image of the disk, or the source that it begins from"
// +kubebuilder:validation:XValidation:rule="!has(self.image) || !has(self.source) || !has(self.source.claim)",message="a disk from a claim has no image: remove image, or source"
// +kubebuilder:validation:XValidation:rule="has(self.image) || (has(self.population) && self.population == 'Snapshot')",message="a disk without an image is cloned by the storage: population must be Snapshot"
// +kubebuilder:validation:XValidation:rule="self.type == 'PersistentVolume' || !has(self.source)",message="Local disks are not cloned: remove source"
// +kubebuilder:validation:XValidation:rule="has(self.image) == has(oldSelf.image) && has(self.source) == has(oldSelf.source)",message="image and source are immutable: make another VMIdentitySet"
// +kubebuilder:validation:XValidation:rule="!has(self.follow) || has(self.image) && !has(self.source)",message="follow needs the image from which it begins, and no source"
// +kubebuilder:validation:XValidation:rule="!has(self.follow) || has(self.population) && self.population == 'Snapshot' || has(self.attachment) && self.attachment == 'Service'",message="follow needs population Snapshot or attachment Service: any other pod has the set's image as a volume before its disk is known"
// +kubebuilder:validation:XValidation:rule="!has(self.image) || !self.image.matches('^https?://') || has(self.population) && self.population == 'Snapshot' && !has(self.follow)",message="a disk from a web address needs population Snapshot, and follows no tag: only containers' images can be volumes of a pod"
// +kubebuilder:validation:XValidation:rule="has(self.blockSize) == has(oldSelf.blockSize)",message="blockSize is immutable: make another VMIdentitySet"
// +kubebuilder:validation:XValidation:rule="has(self.storageClassName) == has(oldSelf.storageClassName) && has(self.usageType) == has(oldSelf.usageType)",message="storageClassName and usageType are immutable: make another VMIdentitySet"
type DiskSpec struct {
	// image is the container image with the disk, by its digest. With population Snapshot it may
	// be the web address of a file, as https://HOST/PATH@sha256:... Only a disk that begins from a
	// claim has none. One that begins from another disk has the same as that.
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.matches('^[^@\\\\s]+@sha256:[a-f0-9]{64}$')",message="must name an image by its digest, as registry/name@sha256:..."
	// +optional
	Image string `json:"image,omitempty"`

	// follow is a tag of the image's repository, in a VMIdentitySet: the disks of new identities
	// begin from what it names. Disks that exist stay as they are.
	// +optional
	Follow *FollowSpec `json:"follow,omitempty"`

	// source is where the disk begins, instead of from the image alone. Its storage clones it.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentity"
	// +optional
	Source *DiskSource `json:"source,omitempty"`

	// type is where the disk lives.
	// +kubebuilder:default=PersistentVolume
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentitySet"
	// +optional
	Type Type `json:"type,omitempty"`

	// size of the disk in bytes, as a quantity. Without it, the disk is as large as its image, and
	// its claim as large as the controller's --claim-size.
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",message="must be a quantity above 0, as 20Gi"
	// +kubebuilder:validation:XValidation:rule="!isQuantity(string(self)) || !quantity(string(self)).isGreaterThan(quantity('0')) || quantity(string(self)).compareTo(quantity('512')) >= 0",message="must be at least 512 bytes: 100m is a tenth of a byte, 100M is 100 million bytes, 100Mi a little more"
	// +kubebuilder:validation:XValidation:rule="!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('4Ei')) <= 0",message="must be at most 4Ei: no disk is larger"
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).compareTo(quantity(string(oldSelf))) >= 0",message="may only grow"
	// +optional
	Size *resource.Quantity `json:"size,omitempty"`

	// blockSize is the length of the disk's logical blocks in bytes: 512 or 4096. Without it, it is
	// 512. A guest finds nothing on a disk that was written with blocks of another length, so an
	// image has to be made for 4096, and a disk has the same as that from which it begins.
	// +kubebuilder:validation:Enum=512;4096
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentitySet"
	// +optional
	BlockSize int32 `json:"blockSize,omitempty"`

	// storageClassName is the class of the claim. Without it and without usageType, the claim has
	// the cluster's default class.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentitySet"
	// +optional
	StorageClassName *string `json:"storageClassName,omitempty"`

	// usageType is a kind of storage. The administrator maps it to a class with the controller's
	// --usage-type NAME=CLASS.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentitySet"
	// +optional
	UsageType string `json:"usageType,omitempty"`

	// firmwareUUID is the SMBIOS UUID of the machine.
	// +kubebuilder:validation:Format=uuid
	// +kubebuilder:validation:MaxLength=36
	// +optional
	FirmwareUUID string `json:"firmwareUUID,omitempty"`

	// firmwareUUIDPolicy says how many machines firmwareUUID is for: Fixed, the default, or PerPod.
	// +optional
	FirmwareUUIDPolicy FirmwareUUIDPolicy `json:"firmwareUUIDPolicy,omitempty"`

	// population is how the image gets into the claim.
	// +kubebuilder:default=Overlay
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable: make another VMIdentitySet"
	// +optional
	Population Population `json:"population,omitempty"`

	// attachment is how a machine reaches the disk.
	// +kubebuilder:default=Sidecar
	// +optional
	Attachment Attachment `json:"attachment,omitempty"`
}

// DiskSource is a disk of the same namespace from which another one begins.
//
// +kubebuilder:validation:XValidation:rule="[has(self.claim), has(self.identity), has(self.snapshot)].filter(x, x).size() == 1",message="name one of claim, identity and snapshot"
type DiskSource struct {
	// claim is a PersistentVolumeClaim that has the whole disk in its file disk.img.
	// +optional
	Claim SourceName `json:"claim,omitempty"`
	// identity is a VMIdentity that no pod uses, and whose cloneableBy names the new one.
	// +optional
	Identity SourceName `json:"identity,omitempty"`
	// snapshot is a VMIdentitySnapshot.
	// +optional
	Snapshot SourceName `json:"snapshot,omitempty"`
}

// SourceName is the name of an object of the same namespace.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",message="must be the name of an object of the same namespace, without the namespace"
type SourceName string

// String is the kind and the name of the source, such as identity/web-0.
func (s *DiskSource) String() string {
	switch {
	case s.Claim != "":
		return "claim/" + string(s.Claim)
	case s.Identity != "":
		return "identity/" + string(s.Identity)
	}
	return "snapshot/" + string(s.Snapshot)
}

// VMIdentitySet describes the disks of the pods that name it.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=vmidset
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name=Type,type=string,JSONPath=`.spec.type`
// +kubebuilder:printcolumn:name=Size,type=string,JSONPath=`.spec.size`
// +kubebuilder:printcolumn:name=Identities,type=integer,JSONPath=`.status.identities`
// +kubebuilder:printcolumn:name=Ready,type=boolean,JSONPath=`.status.ready`
// +kubebuilder:printcolumn:name=Reason,type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
type VMIdentitySet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:validation:XValidation:rule="self.attachment == oldSelf.attachment",message="attachment is immutable: make another VMIdentitySet"
	// +kubebuilder:validation:XValidation:rule="!has(self.image) || !has(oldSelf.image) || self.image == oldSelf.image",message="image is immutable: make another VMIdentitySet"
	Spec DiskSpec `json:"spec"`
	// A reader of a set that the controller has not seen yet finds it not ready.
	// +kubebuilder:default={ready: false}
	Status VMIdentitySetStatus `json:"status,omitempty"`
}

// VMIdentitySetStatus is the state that the controller has seen.
type VMIdentitySetStatus struct {
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// ready is true when pods can use the set, like condition Ready.
	// +optional
	Ready bool `json:"ready"`
	// identities is how many VMIdentity objects name this set; readyIdentities, how many of them
	// are ready.
	// +optional
	Identities int32 `json:"identities"`
	// +optional
	ReadyIdentities int32 `json:"readyIdentities"`
	// followed is what spec.follow has found. It is there as long as spec.follow is.
	// +optional
	Followed *FollowedStatus `json:"followed,omitempty"`
	// usedBy is the pod whose machine has the firmwareUUID, if that is fixed. No other pod of the
	// set starts until it has ended.
	// +optional
	UsedBy *corev1.ObjectReference `json:"usedBy,omitempty"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// VMIdentitySetList is a list of VMIdentitySet.
//
// +kubebuilder:object:root=true
type VMIdentitySetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VMIdentitySet `json:"items"`
}

// VMIdentity is the disk of one machine. It stays when pods come and go.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=vmid
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="self.spec.attachment == oldSelf.spec.attachment || !has(oldSelf.status) || !has(oldSelf.status.usedBy)",message="a pod uses the disk: attachment can change when that pod has ended"
// +kubebuilder:validation:XValidation:rule="!has(self.spec.image) || !has(oldSelf.spec.image) || self.spec.image == oldSelf.spec.image",message="image is immutable: make another VMIdentity"
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 58",message="the name may have at most 58 characters, as the names of the claim and of labels are made from it"
// +kubebuilder:printcolumn:name=Ready,type=boolean,JSONPath=`.status.ready`
// +kubebuilder:printcolumn:name=Set,type=string,JSONPath=`.spec.setName`
// +kubebuilder:printcolumn:name=Size,type=string,JSONPath=`.status.size`
// +kubebuilder:printcolumn:name=Used by,type=string,JSONPath=`.status.usedBy.name`
// +kubebuilder:printcolumn:name=Node,type=string,JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name=Hydrated,type=string,JSONPath=`.status.conditions[?(@.type=="Hydrated")].status`
// +kubebuilder:printcolumn:name=Reason,type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name=Claim,type=string,priority=1,JSONPath=`.status.claimName`
// +kubebuilder:printcolumn:name=Image,type=string,priority=1,JSONPath=`.spec.image`
type VMIdentity struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec VMIdentitySpec `json:"spec"`
	// A reader of an identity that the controller has not seen yet finds it not ready.
	// +kubebuilder:default={ready: false}
	Status VMIdentityStatus `json:"status,omitempty"`
}

// VMIdentitySpec is a copy of the set's spec from when the identity was made. Later only size
// follows the set: it grows when the set's size does.
//
// +kubebuilder:validation:XValidation:rule="has(self.setName) == has(oldSelf.setName) && (!has(self.setName) || self.setName == oldSelf.setName)",message="setName is immutable: make another VMIdentity"
// +kubebuilder:validation:XValidation:rule="has(self.firmwareUUID) == has(oldSelf.firmwareUUID) && (!has(self.firmwareUUID) || self.firmwareUUID == oldSelf.firmwareUUID)",message="firmwareUUID is immutable: make another VMIdentity"
// +kubebuilder:validation:XValidation:rule="has(self.followedTag) == has(oldSelf.followedTag) && (!has(self.followedTag) || self.followedTag == oldSelf.followedTag)",message="followedTag is immutable: make another VMIdentity"
// +kubebuilder:validation:XValidation:rule="!has(self.follow)",message="a disk that exists follows no tag: a VMIdentitySet has follow"
type VMIdentitySpec struct {
	DiskSpec `json:",inline"`

	// setName is the VMIdentitySet that this identity was made from. An identity that a user makes
	// without a set has none.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	SetName string `json:"setName,omitempty"`

	// followedTag is the tag that named the image when the disk began from it, if the set follows
	// one.
	// +kubebuilder:validation:MaxLength=128
	// +optional
	FollowedTag string `json:"followedTag,omitempty"`

	// cloneableBy names the VMIdentities of the namespace that may begin from this one; "*" is all
	// of them. Without it, none may.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	// +listType=set
	// +optional
	CloneableBy []string `json:"cloneableBy,omitempty"`

	// export commits the disk to an image, once, when no pod uses it. Another export begins when
	// this changes.
	// +optional
	Export *ExportSpec `json:"export,omitempty"`
}

// ExportSpec is an image that a disk is committed to.
type ExportSpec struct {
	// reference is the image that is pushed: REGISTRY/NAME:TAG.
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-zA-Z0-9.-]+(:[0-9]+)?/[a-z0-9._/-]+:[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}$')",message="must be an image in a registry with a tag, as registry/name:tag"
	Reference string `json:"reference"`
	// secretName is a secret of the namespace, of type kubernetes.io/dockerconfigjson, with the
	// credential for the reference, and for the image of the disk if that needs one. Its name
	// begins with vmexport-: no other secret can be used for this.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^vmexport-[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",message="must begin with vmexport-, so that no other secret of the namespace is used: kubectl create secret docker-registry vmexport-..."
	// +optional
	SecretName string `json:"secretName,omitempty"`
	// registryCA is a key of a ConfigMap of the namespace with certificates (PEM) that are trusted
	// beside the usual ones, for the registry of the reference and for that of the disk's image.
	// +optional
	RegistryCA *ConfigMapKey `json:"registryCA,omitempty"`
	// flat stores the whole disk as one file, as KubeVirt's containerDisk needs it. Otherwise the
	// new image has the layers of the disk's image, and one with what differs.
	// +optional
	Flat bool `json:"flat,omitempty"`
}

// ConfigMapKey is a key of a ConfigMap of the same namespace.
type ConfigMapKey struct {
	Name SourceName `json:"name"`
	// key is ca.crt where nothing else is said.
	// +kubebuilder:default=ca.crt
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[-._a-zA-Z0-9]+$') && !self.startsWith('..')",message="must be a key of a ConfigMap"
	// +optional
	Key string `json:"key,omitempty"`
}

// NeedsNoImage reports whether a claim of the identity has a disk that needs its image no more.
func (i *VMIdentity) NeedsNoImage(claim types.UID) bool {
	return i.Spec.Population == Snapshot || claim != "" && i.Status.HydratedClaim == claim
}

// MayBeClonedBy reports whether a VMIdentity of the same namespace may begin from this one.
func (s *VMIdentitySpec) MayBeClonedBy(name string) bool {
	return slices.Contains(s.CloneableBy, name) || slices.Contains(s.CloneableBy, "*")
}

// VMIdentityStatus is the state that the controller has seen.
type VMIdentityStatus struct {
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// ready is true when a pod may start with this disk, like condition Ready.
	// +optional
	Ready bool `json:"ready"`
	// creationTime is when the identity was ready for the first time.
	// +optional
	CreationTime *metav1.Time `json:"creationTime,omitempty"`
	// claimName is the claim with the data, and secretName the secret with the CHAP credential.
	// +optional
	ClaimName string `json:"claimName,omitempty"`
	// +optional
	SecretName string `json:"secretName,omitempty"`
	// hydratedClaim is the UID of the claim whose disk needs its image no more. A claim that a
	// backup has restored has another UID. +optional
	HydratedClaim types.UID `json:"hydratedClaim,omitempty"`
	// size of the claim's volume.
	// +optional
	Size *resource.Quantity `json:"size,omitempty"`
	// nodeName is the node of the pod that uses the disk.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// usedBy is the pod that uses the disk.
	// +optional
	UsedBy *corev1.ObjectReference `json:"usedBy,omitempty"`
	// migratesTo is the pod that the machine of KubeVirt in that pod migrates into. No other pod
	// starts beside the two.
	// +optional
	MigratesTo *corev1.ObjectReference `json:"migratesTo,omitempty"`
	// move is the state of a move to another node, from its start to its end.
	// +optional
	Move *MoveStatus `json:"move,omitempty"`
	// export is the last export. It is there as long as spec.export is.
	// +optional
	Export *ExportStatus `json:"export,omitempty"`
	// signedBy is the key that has signed the image. It is there where the administrator asks for
	// signatures.
	// +optional
	SignedBy *SignedBy `json:"signedBy,omitempty"`
	// portal is the address of a disk with attachment Service: host:port.
	// +optional
	Portal string `json:"portal,omitempty"`
	// targetName is the IQN of the disk's iSCSI target.
	// +optional
	TargetName string `json:"targetName,omitempty"`
	// handover is the last step of a handover that was done: open, finish or cancel, and the
	// initiator.
	// +optional
	Handover string `json:"handover,omitempty"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SignedBy is a signature that was verified.
type SignedBy struct {
	// image is that of the spec.
	Image string `json:"image"`
	// key is the fingerprint of the public key: SHA-256 of its SPKI.
	Key string `json:"key"`
}

// ExportStatus is the state of an export.
type ExportStatus struct {
	// reference is that of the spec when the export began.
	Reference string `json:"reference"`
	// jobName is the Job that does it.
	JobName string `json:"jobName"`
	// running is true while the disk belongs to the Job. No pod starts with it then.
	// +optional
	Running bool `json:"running,omitempty"`
	// digest is that of the image that was pushed.
	// +optional
	Digest string `json:"digest,omitempty"`
	// +optional
	StartTime *metav1.Time `json:"startTime,omitempty"`
	// +optional
	CompletionTime *metav1.Time `json:"completionTime,omitempty"`
}

// MoveStep is the step of a move.
// +kubebuilder:validation:Enum=Copy;Point
type MoveStep string

const (
	// Copy fills another volume. The disk is where it was, and the move can be given up.
	Copy MoveStep = "Copy"
	// Point gives the claim of the identity the other volume. The move goes on to its end.
	Point MoveStep = "Point"
)

// MoveStatus is the state that a restarted controller needs to continue a move.
type MoveStatus struct {
	// to is the node that the disk moves to, and from is its node before, if that is known.
	To string `json:"to"`
	// +optional
	From string   `json:"from,omitempty"`
	Step MoveStep `json:"step"`
	// claimUID, volumeName and volumeUID are the claim with the disk when the move began, and its
	// volume.
	ClaimUID   types.UID `json:"claimUID"`
	VolumeName string    `json:"volumeName"`
	// +optional
	VolumeUID types.UID `json:"volumeUID,omitempty"`
	// accessMode and size are those of that claim. The new claim gets them, too.
	AccessMode corev1.PersistentVolumeAccessMode `json:"accessMode"`
	Size       resource.Quantity                 `json:"size"`
	// made has the UIDs of the objects that the controller made for the move, by their names. An
	// object that has the name and not the UID was made by somebody else.
	// +optional
	Made map[string]types.UID `json:"made,omitempty"`
	// newVolumeName and newVolumeUID are the volume with the copy of the disk, in step Point.
	// +optional
	NewVolumeName string `json:"newVolumeName,omitempty"`
	// +optional
	NewVolumeUID types.UID `json:"newVolumeUID,omitempty"`
}

// VMIdentityList is a list of VMIdentity.
//
// +kubebuilder:object:root=true
type VMIdentityList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VMIdentity `json:"items"`
}
