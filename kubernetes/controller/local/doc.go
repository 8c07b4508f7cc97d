// Package local moves the disks of identities of type Local to other nodes.
//
// # Who asks for it
//
// A volume of one node holds its pods there. A pod that has to run elsewhere would never find a
// node, so it has to say so while it is still held at its gate: by the node selector
// kubernetes.io/hostname, with one name. So a StatefulSet or a VMPet whose template gets another
// node takes its disk along. The annotation disk.kubevirt.io/move-to of the identity says the same
// without a pod, for people who empty a node, and goes first. Looser constraints, such as
// affinities, are left to the scheduler: it brings the pod to the disk.
//
// # What happens
//
// A move begins when nobody uses the disk. It is noted in the status, in the one write that also
// makes the identity not ready. That write fails if a pod got the disk meanwhile, and from then on
// package pod holds all pods. Then
//
//	claim vmmove-NAME  of the same class; its volume is made where the receiver runs
//	Job   vmsend-NAME  on the node of the claim vmid-NAME: kubevirt-disk-controller send
//	Job   vmrecv-NAME  on the other node: kubevirt-disk-controller receive
//
// copy the disk, encrypted by the identity's own secret, and compare digests. Until then nothing
// that the identity has was changed, and the move ends if nobody asks for it any more.
//
// The volumes of pods cannot be changed, so the claim must have its name again afterwards. Both
// volumes are told to stay when their claims go (Retain), and remember what they had said before in
// an annotation. The two claims are deleted. The new volume is kept for a claim vmid-NAME, that
// claim is made, and when it is bound, both volumes get their own policies back: which removes the
// old one, as the last thing of all, where its class says so.
//
// # What may be lost, and what not
//
// At each moment one volume at least has the whole disk and stays. If the node of the disk is gone,
// or the new one has no room, condition Moving says so, and all waits. If the identity is deleted
// while the claims change, the volumes stay, and an event names them.
package local
