// Package source finds the source of an identity's claim. It knows three sources:
//
//   - nothing, for population Overlay: the claim is empty, and the server reads the image;
//   - the VolumeSnapshot of the image, for population Snapshot, which package snapshot makes;
//   - spec.source: a claim with a file disk.img, the claim of another identity, or the
//     VolumeSnapshot of a VMIdentitySnapshot.
//
// All of them are in the namespace of the identity. The rest is about spec.source.
//
// The storage clones, as for any claim with a dataSourceRef: this package copies nothing, and the
// identity is ready when its claim is made. A driver makes the volume at once or for the first pod.
// Until then the source has to stay, so Waiting holds its deletion if it is an object of our API
// group.
//
// Both sides agree to a clone: an identity lists in cloneableBy who may use it as a source, and a
// snapshot is made by a user who may make snapshots. A claim of an identity is no source by itself.
// A disk that a pod may write is no source either, because the clone would have no point in time;
// use a snapshot.
//
// A provisioner that is no CSI driver may ignore a source, and give the claim an empty volume. So
// the class must have a driver for which the cluster has a CSIDriver.
package source
