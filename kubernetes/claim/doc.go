// Package claim turns a volume claim into a disk of a libvirt domain: what a VM specification means
// by
//
//	disks:
//	  - source:
//	      pvc:
//	        claimname: some-pvc-name
//
// Whoever makes the domain reads the claim and its volume from the API server and calls Disk. Where
// the volume is a network block device that QEMU speaks itself (iSCSI, RBD), the domain uses it
// directly: nothing has to be mounted. Otherwise the claim is mounted into the pod of QEMU, and
// Options.Path says where: the disk is then the block device, or the file disk.img on the file
// system.
//
// Secrets are only referred to. This package reads no secret, and returns no value of one.
//
// Every refusal is an *Error, whose Reason a program can tell apart.
package claim
