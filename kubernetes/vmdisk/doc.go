// Package vmdisk puts container disks into a virtual machine: disks whose image is a container
// image, FROM kubevirt.io:disk, that a container of the VM's pod serves.
//
// A VM specification names them like this, and other disks beside them:
//
//	disks:
//	  - type: ContainerRegistryDisk:v1alpha
//	    source:
//	      name: vmdisks/fedora25:latest
//	    target:
//	      device: sda
//
// Parse reads that. Whoever makes the pod then calls AddToPod, and whoever makes the domain calls
// AddToDomain, with the same disks in the same order: the place of a disk in the list decides its
// port. Nothing else has to be exchanged between the two.
//
// Both change their argument completely, or return an error and do not change it. An error reports
// everything that is wrong: it joins a libvirt.FieldError for each field.
package vmdisk
