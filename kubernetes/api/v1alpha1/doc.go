// Package v1alpha1 has the types of the API group disk.kubevirt.io: disks of virtual machines that
// outlive the pods that use them.
//
// A user makes a VMIdentitySet, and names it in an annotation of pods. Admission holds these pods
// with a scheduling gate and gives them their disks. The controller makes a VMIdentity for each pod
// if there is none, makes the claim and the CHAP secret of the identity, and removes the gate. A
// VMIdentity stays until somebody deletes it, whatever happens to pods and sets. A VMPet makes a
// VMIdentitySet and a StatefulSet of one pod.
//
// The deep copies and the CRDs of the chart are made from this package by `make generate`.
//
// +kubebuilder:object:generate=true
// +groupName=disk.kubevirt.io
package v1alpha1
