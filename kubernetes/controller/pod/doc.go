// Package pod starts the pods that admission holds. It makes the VMIdentity that a pod asks for if
// it is missing, and removes the pod's gate when the identity is ready and has no other user.
//
// # One at a time
//
// A disk has one user. The status of the identity names the pod, by its UID, before the gate is
// removed. It is written with the version that was read, so of two pods, or of two controllers that
// run at once, only one gets the disk. The name stays until that very pod has ended: its phase
// shows it, or the API server no longer knows the pod. The cache is not asked, because it may not
// know the pod yet.
//
// A fixed firmwareUUID is for one machine of the whole set. The status of the set names its pod in
// the same way, and is written first. The end of the pod frees both, even if the controller was
// killed between the two writes.
package pod
