// Package pod starts the pods that admission holds. It makes the VMIdentity that a pod asks for, if
// there is none, and takes the pod's gate away when the identity is ready and nobody else uses it.
//
// # One at a time
//
// A disk has one user. The status of the identity names the pod, by its UID, before the gate goes.
// It is written against the version that was read, so of two pods, or of two controllers that run
// at once, one gets the disk. The name stays until that very pod has ended: its phase says so, or
// the API server no longer knows it. The cache is not asked about that, because it may not know a
// pod yet.
//
// A fixed firmwareUUID is for one machine of the whole set. The status of the set names its pod in
// the same way, and is written first. The end of the pod frees both, also if the controller was
// killed between the two writes.
package pod
