// Package snapshot fills the claims of identities with population Snapshot: the image is written
// into one claim for each image, storage class and namespace, a VolumeSnapshot is taken of that,
// and the claims of identities are made from it.
//
// What is made for an image is called golden here. It is
//
//	Job             golden-HASH  writes the image into the claim, by `kubevirt-disk pull`
//	claim           golden-HASH  of the Job
//	VolumeSnapshot  golden-HASH  of the Job; made when the Job is complete
//
// The Job is owned by every identity that uses the image, and by nobody else. So Kubernetes
// collects it after the last of them, and claim and snapshot after it. A Job that fails is deleted
// after a while, with the claim that it has filled in part, and all is made again: it is one thing
// that is there whole, or not. While a Job, a claim or a snapshot is being deleted, nothing is made
// from it any more: its end is waited for.
//
// What the claim of an identity has then is disk.img, complete. The server needs no image beside
// it: the daemon serves a disk.img in its PERSISTENT_DIR where it finds no image, as it is, and
// enlarges it to SIZE. That is vmdisk.Disk.Filled, for sidecars and for package service.
package snapshot
