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
// The only owners of the Job are identities that use the image, at most maxOwners of them. So
// Kubernetes deletes the Job after the last of them, and then the claim and the snapshot. A failed
// Job is deleted after a while, together with its incomplete claim, and everything is made again.
// The same happens if the claim was deleted before there was a snapshot. So an image is there
// completely or not at all. No object is made from a Job, a claim or a snapshot that is being
// deleted: the controller waits for its end.
//
// The claim of an identity then has a complete disk.img, and the server needs no image: without
// one, the daemon serves a disk.img in its PERSISTENT_DIR unchanged, and enlarges it to SIZE.
// Sidecars and package service use vmdisk.Disk.Filled for this.
package snapshot
