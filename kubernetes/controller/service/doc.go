// Package service serves the disk of a VMIdentity with attachment Service from its own Deployment
// behind a Service, so that two machines can reach it while one is migrated to the other.
//
// The Deployment has the container that a sidecar would have, made by kubernetes/vmdisk. All
// objects have the name of the claim, vmid-NAME. The status has portal and target name.
//
// With annotation v1alpha1.AnnotationVolumeClaim, the LUN is also a PersistentVolume of type iscsi,
// with a claim: the kubelet logs in by the node's initiator, and a pod gets a block device. Volume
// and claim never touch the data, because the volume's policy is Retain.
//
// # Handover
//
// Annotations of the VMIdentity name the machine that takes the disk over, and the step to do now.
// The controller copies them into an annotation of the server's pod. The kubelet writes it into a
// file of the downward API, which the daemon follows, and the daemon's page /status has the result.
//
// So the daemon has no port for commands, and needs no key or certificate: the right to hand a disk
// over is the right to change its pod, which the controller needs anyway to remove gates. The right
// to run commands in pods (pods/exec), which people use for a handover, would let the controller do
// everything that any pod of the cluster can. An endpoint with TLS and a token would need a secret
// that the controller can read, while it reads none now, and certificates that have to be renewed.
//
// # Upgrades
//
// A new image of the server in the controller's options applies to new Deployments. Existing
// Deployments keep theirs, because otherwise all machines of the cluster would wait for their disks
// at once. A deleted Deployment is made again with the new image.
package service
