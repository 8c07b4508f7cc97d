package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Conditions of a VMIdentity. A VMIdentitySet and a VMPet have a condition Ready, too.
const (
	// ConditionReady says that a pod may start with this disk.
	ConditionReady = "Ready"
	// ConditionBound says that the claim has its volume. If the storage class waits for the first
	// consumer, the claim is bound only after the pod was scheduled, so Ready does not wait for it.
	ConditionBound = "Bound"
	// ConditionInUse says which pod uses the disk.
	ConditionInUse = "InUse"
	// ConditionHydrated says that the disk no longer needs its image.
	ConditionHydrated = "Hydrated"
	// ConditionTroubled says what is wrong with a disk that is in use. A disk that never was in
	// trouble has none.
	ConditionTroubled = "Troubled"
	// ConditionServed says that initiators can log in to a disk with attachment Service.
	ConditionServed = "Served"
	// ConditionVolumeReady says that the claim of AnnotationVolumeClaim has the disk.
	ConditionVolumeReady = "VolumeReady"
	// ConditionHandedOver reports the handover that annotations ask for.
	ConditionHandedOver = "HandedOver"
	// ConditionMoving says that a disk of type Local is being moved to another node, how much of it
	// has moved, and what the move waits for.
	ConditionMoving = "Moving"
	// ConditionExported says that the disk was committed to the image of spec.export, or how far
	// that is.
	ConditionExported = "Exported"
	// ConditionVerified says by which key the image is signed, where signatures are asked for, or
	// why it is not used.
	ConditionVerified = "Verified"
	// ConditionFollowed is on a VMIdentitySet: what its tag names, or why nobody knows.
	ConditionFollowed = "Followed"
	// ConditionPopulated says that there is a snapshot of the image, for population Snapshot.
	ConditionPopulated = "Populated"
)

// Further conditions of a VMIdentitySnapshot, which also has Ready.
const (
	// ConditionProgressing says that the snapshot is being taken, or what it waits for.
	ConditionProgressing = "Progressing"
	// ConditionFailure says that the snapshot has failed, and why. Some failures pass.
	ConditionFailure = "Failure"
)

// Reasons of conditions, and of events.
const (
	ReasonReady           = "Ready"
	ReasonSetMissing      = "SetMissing"
	ReasonSetDiffers      = "SetDiffers"
	ReasonClassMissing    = "ClassMissing"
	ReasonClaimMissing    = "ClaimMissing"
	ReasonClaimPending    = "ClaimPending"
	ReasonClaimBound      = "ClaimBound"
	ReasonClaimLost       = "ClaimLost"
	ReasonClaimForeign    = "ClaimForeign"
	ReasonSecretForeign   = "SecretForeign"
	ReasonSecretMissing   = "SecretMissing"
	ReasonQuotaExceeded   = "QuotaExceeded"
	ReasonResizing        = "Resizing"
	ReasonResizeRefused   = "ResizeRefused"
	ReasonPopulating      = "Populating"
	ReasonPopulationError = "PopulationError"
	ReasonPopulated       = "Populated"
	ReasonInUse           = "InUse"
	ReasonNotInUse        = "NotInUse"
	ReasonUnschedulable   = "Unschedulable"
	ReasonDeleting        = "Deleting"
	ReasonImageDiffers    = "ImageDiffers"
	ReasonUUIDInUse       = "UUIDInUse"
	ReasonHydrated        = "Hydrated"
	ReasonHydrating       = "Hydrating"
	ReasonImageKept       = "ImageKept"
	ReasonDiskWaits       = "DiskWaits"
	ReasonDiskFull        = "DiskFull"
	ReasonDiskFailing     = "DiskFailing"
	ReasonDiskFailed      = "DiskFailed"
	ReasonDiskFenced      = "DiskFenced"
	ReasonDiskRecovered   = "DiskRecovered"
	ReasonUnknown         = "Unknown"
	ReasonServing         = "Serving"
	ReasonStarting        = "Starting"
	ReasonStopping        = "Stopping"
	ReasonStopped         = "Stopped"
	ReasonFailed          = "Failed"
	ReasonInvalid         = "Invalid"

	ReasonSourceMissing   = "SourceMissing"
	ReasonSourceInUse     = "SourceInUse"
	ReasonNotCloneable    = "NotCloneable"
	ReasonExporting       = "Exporting"
	ReasonExported        = "Exported"
	ReasonExportFailed    = "ExportFailed"
	ReasonIdentityMissing = "IdentityMissing"
	ReasonTaking          = "Taking"

	ReasonFollowed   = "Followed"
	ReasonWentBack   = "WentBack"
	ReasonTagMissing = "TagMissing"

	ReasonSigned     = "Signed"
	ReasonNotSigned  = "NotSigned"
	ReasonUnverified = "Unverified"
	ReasonVerifying  = "Verifying"

	ReasonFilling      = "Filling"
	ReasonFilled       = "Filled"
	ReasonFillFailed   = "FillFailed"
	ReasonWaiting      = "Waiting"
	ReasonImageMissing = "ImageMissing"

	ReasonCopying      = "Copying"
	ReasonPointing     = "Pointing"
	ReasonMoved        = "Moved"
	ReasonStays        = "Stays"
	ReasonSourceGone   = "SourceGone"
	ReasonTargetFailed = "TargetFailed"

	ReasonHandoverPending   = "HandoverPending"
	ReasonHandoverOpen      = "HandoverOpen"
	ReasonHandedOver        = "HandedOver"
	ReasonHandoverCancelled = "HandoverCancelled"
)

// GetConditions are the conditions in the status.
func (o *VMIdentity) GetConditions() []metav1.Condition { return o.Status.Conditions }

// GetConditions are the conditions in the status.
func (o *VMIdentitySet) GetConditions() []metav1.Condition { return o.Status.Conditions }

// GetConditions are the conditions in the status.
func (o *VMIdentitySnapshot) GetConditions() []metav1.Condition { return o.Status.Conditions }

// GetConditions are the conditions in the status.
func (o *VMPet) GetConditions() []metav1.Condition { return o.Status.Conditions }
