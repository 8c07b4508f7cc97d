// Package vmdisk puts container disks into a virtual machine. The image of such a disk is a
// container image, FROM kubevirt.io:disk, and a container in the VM's pod serves the disk.
//
// A VM specification lists them like this, together with other disks:
//
//	disks:
//	  - type: ContainerRegistryDisk:v1alpha
//	    source:
//	      name: vmdisks/fedora25:latest
//	    target:
//	      device: sda
//
// Parse reads this list. The program that makes the pod then calls AddToPod, and the one that makes
// the domain calls AddToDomain, with the same disks in the same order: the place of a disk in the
// list decides its port. The two need not exchange anything else.
//
// Both functions change their argument completely, or return an error and do not change it. The
// error joins a libvirt.FieldError for each wrong field.
package vmdisk
