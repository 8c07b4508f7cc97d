// Package local moves the disks of identities of type Local to other nodes.
//
// # Requests
//
// A volume of one node ties its pods to that node. A pod with constraints for another node would
// never be scheduled, so it has to name its node while its gate still holds it: by the node
// selector kubernetes.io/hostname, with one name. So if the template of a StatefulSet or a VMPet
// gets another node, the disk follows. People who empty a node can request a move without a pod,
// with the annotation disk.kubevirt.io/move-to of the identity. The annotation has precedence over
// pods. Looser constraints, such as affinities, are left to the scheduler: it brings the pod to the
// disk.
//
// # Steps
//
// A move begins when the disk is not in use. One write to the status both records the move and
// makes the identity not ready. That write fails if a pod got the disk meanwhile, and from then on
// no pod leaves its gate. Then
//
//	claim vmmove-NAME  of the same class; its volume is made where the receiver runs
//	Job   vmsend-NAME  on the node of the claim vmid-NAME: kubevirt-disk-controller send
//	Job   vmrecv-NAME  on the other node: kubevirt-disk-controller receive
//
// copy the disk, encrypted by the identity's own secret, and compare digests. Until then the
// identity's own objects are unchanged, and the move ends if it is not requested any more.
//
// The volumes of a pod cannot be changed, so the claim must have the same name afterwards. Both
// volumes get the reclaim policy Retain, so that they outlive their claims; an annotation records
// their own policies. The two claims are deleted. The new volume is reserved for a claim vmid-NAME,
// and that claim is made. When it is bound, both volumes get their own policies back. As the last
// step, this removes the old volume if its class says so.
//
// # What is trusted
//
// Anybody who may edit the namespace can make a Job or a claim with these names, labels and owner.
// So the status records the UID of each object that was made for the move, and only these count. A
// claim may name any volume of the cluster in its spec: only a volume whose claimRef has the UID of
// the claim is its volume. A volume of another claim is never changed.
//
// # What may be lost, and what not
//
// At each moment at least one volume that stays has the whole disk. If the disk's node is lost, or
// the new one has no room, condition Moving reports it, and the move waits. If the identity is
// deleted while the claims change, the volumes stay, and an event names them.
package local
