// Package disk says what a disk is: the interfaces that a target serves, identity, and the errors
// that mean something to it.
//
// The SCSI layer reads and writes a Disk. Other abilities of a disk are interfaces of their own
// (Discarder, Zeroer, Extenter and others). A front end asks for them once, when it learns of the
// disk. disk/image reads images, disk/overlay is a writable disk above an image, and disk/instance
// makes disks of images, and knows them again. This package imports nothing but Go's own.
package disk
