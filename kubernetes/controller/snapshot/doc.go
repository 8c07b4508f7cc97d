// Package snapshot fills the claims of identities with population Snapshot. It writes the image
// into one claim for each image, storage class and namespace, takes a VolumeSnapshot of that claim,
// and the claims of identities are made from the snapshot.
//
// The objects that are made for an image are called golden here. They are
//
//	Job             golden-HASH  writes the image into the claim, by `kubevirt-disk pull`
//	claim           golden-HASH  of the Job
//	VolumeSnapshot  golden-HASH  of the Job; made when the Job is complete
//
// The Job is owned by identities that use the image, at most maxOwners of them, and by nobody else.
// So Kubernetes collects it after the last of these, and then the claim and the snapshot. A failed
// Job is deleted after a while, together with its half-filled claim, and everything is made again.
// So is one whose claim somebody has deleted before there was a snapshot. So an image is there
// completely or not at all. Nothing is made from a Job, a claim or a snapshot that is being
// deleted: the controller waits for its end.
//
// The claim of an identity then has a complete disk.img. The server needs no image beside it:
// without an image, the daemon serves a disk.img in its PERSISTENT_DIR as it is, and enlarges it to
// SIZE. Sidecars and package service use vmdisk.Disk.Filled for this.
package snapshot
