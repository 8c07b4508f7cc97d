// Package claim turns a volume claim into a disk of a libvirt domain, for a VM specification with
//
//	disks:
//	  - source:
//	      pvc:
//	        claimname: some-pvc-name
//
// The program that makes the domain reads the claim and its volume from the API server and calls
// Disk. If QEMU itself has a driver for the volume (iSCSI, RBD), the domain uses the network block
// device directly: nothing has to be mounted. Otherwise the claim is mounted into the pod of QEMU
// at Options.Path: the disk is then the block device, or the file disk.img on the file system.
//
// Secrets are only referred to. This package reads no secret, and returns no value of one.
//
// Every refusal is an *Error, with a Reason for programs.
package claim
