// Package fill fills claims with the disks of VMImages, as a volume populator does.
//
// A claim names a VMImage of its namespace as its dataSourceRef. Kubernetes makes no volume for
// such a claim. This package makes
//
//	claim vmfill-UID  like the waiting claim (with that UID), but without the source
//	Job   vmfill-UID  kubevirt-disk pull, into the volume of the former
//
// and then gives the volume to the waiting claim, by the volume's claimRef. Kubernetes binds the
// two. The new claim and the Job are deleted. The volume stays, because it is no longer theirs. If
// the storage class waits for the first consumer, all this waits, too, and the volume is made where
// the consumer's pod will run.
//
// # What is trusted
//
// Anybody who may edit the namespace can make a claim and a Job with these names and owners. That
// gives a disk with other content, which such a user could write anyway. A volume is given away
// only if its claimRef has the UID of the filled claim, in the namespace of the waiting one: so it
// was a volume of that namespace before.
//
// The image is fetched in the namespace, with a secret of the namespace. The controller reads no
// secret.
package fill
