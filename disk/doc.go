// Package disk says what a disk is: the interfaces that a target serves, identity, and the errors
// that mean something to it.
//
// A Disk is what the SCSI layer reads and writes; what it can do beyond that are interfaces of its
// own, which the SCSI layer asks for once, when the LUN is made. disk/image reads images,
// disk/overlay is a writable disk over one, and disk/instance makes disks of images, and knows them
// again. This package imports nothing but Go's own.
package disk
