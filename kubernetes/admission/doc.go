// Package admission changes or refuses a pod that names a VMIdentitySet: it gives the pod its disk,
// and a scheduling gate that holds it until the disk is ready.
//
// A pod gets from a set with attachment Sidecar:
//
//   - the scheduling gate api.Gate, and the labels api.LabelIdentity and api.LabelSet;
//   - the container disk-vda, which serves the disk on 127.0.0.1:3260, and which starts before the
//     pod's own containers and ends after them, with its volumes;
//   - in each of the pod's own containers, CredentialDir with the credential of the disk.
//
// With attachment Service, the disk is served elsewhere, and the pod gets no container.
//
// In a pod with a machine of KubeVirt, the first hook sidecar serves the disk, and gets the
// volumes. QEMU reaches it at a socket in the pod, without a credential. Such a pod may ask for
// further disks, by annotations with the numbers of the hook sidecars that serve them. Each has its
// own identity, gate and volumes.
//
// Errors are for the person who made the pod.
package admission
