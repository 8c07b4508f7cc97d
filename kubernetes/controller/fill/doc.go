// Package fill fills claims with the disks of VMImages, as a volume populator does.
//
// A claim names a VMImage of its namespace as its dataSourceRef. Kubernetes makes no volume for
// such a claim. This package makes
//
//	claim vmfill-UID  as the claim that waits (UID is that of the latter), without the source
//	Job   vmfill-UID  kubevirt-disk pull, into the volume of the former
//
// and then gives the volume to the claim that waits, by the volume's claimRef. Kubernetes binds the
// two. Claim and Job are deleted, and the volume stays, because it is no longer theirs. If the
// class waits for the first consumer, so does all this, and the volume is made where the consumer's
// pod will run.
//
// # What is believed
//
// Anybody who may edit the namespace can make a claim and a Job with these names and owners, and
// gets a disk with another content, which he could write into it anyway. A volume is given away
// only if its claimRef has the UID of the claim that was filled, in the namespace of the claim that
// waits: it was a volume of that namespace before.
//
// The image is fetched in the namespace, with a secret of the namespace. The controller reads no
// secret.
package fill
