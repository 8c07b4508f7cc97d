// Package controller makes the controllers of the API group disk.kubevirt.io from their packages:
//
//	identity   VMIdentity -> secret, claim and status
//	pod        a pod that admission holds -> its VMIdentity, and then its gate is removed
//	set        VMIdentitySet -> status, and growth of its identities
//	state      asks a pod whether its disk still needs the image, and for problems of the disk
//	service    a disk with attachment Service: Deployment, Service, iSCSI volume, handover
//	snapshot   the image in a claim, and a snapshot of the claim, for population Snapshot
//	local      type Local: moves a disk to the node where its pod has to run
//	pet        VMPet -> VMIdentitySet and StatefulSet
//	verify     required signatures of images
//	follow     the tag that a VMIdentitySet follows -> the image of new identities
//	objects    functions of all controllers for writing objects
//
// A user's pod names a VMIdentitySet. Admission gives the pod a scheduling gate and its disk. Then
// controller pod makes the VMIdentity if it is missing, controller identity makes the claim and the
// CHAP secret, and controller pod removes the gate when the identity is ready and no other pod uses
// it.
//
// Controllers read from a cache that Cache limits: of pods and claims it has only those of an
// identity, and no secret at all. A kind that no controller watches cannot be read by accident,
// because the service account may not list it.
package controller
