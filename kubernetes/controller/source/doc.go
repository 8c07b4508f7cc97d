// Package source finds what the claim of an identity begins from. It knows three sources:
//
//   - nothing, for population Overlay: the claim is empty, and the server reads the image;
//   - the VolumeSnapshot of the image, for population Snapshot, which package snapshot makes;
//   - spec.source: a claim with a file disk.img, the claim of another identity, or the
//     VolumeSnapshot of a VMIdentitySnapshot.
//
// All of them are in the namespace of the identity. What follows is about spec.source.
//
// The storage clones, as it does for any claim with a dataSourceRef: nothing is copied here, and
// the identity is ready when its claim is made. A driver makes the volume at once or for the first
// pod. Until then the source has to stay, so Waiting holds its deletion where it is an object of
// ours.
//
// Both sides agree to a clone: an identity says by cloneableBy who may begin from it, and a
// snapshot is made by somebody who may make snapshots. A claim of an identity is no source by
// itself. A disk that a pod may write is no source either, because a clone has no point in time: a
// snapshot has.
//
// A provisioner that is no CSI driver may ignore a source, and give the claim an empty volume. So
// the class must be of a driver that the cluster has a CSIDriver for.
package source
