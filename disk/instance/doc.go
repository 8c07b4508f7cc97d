// Package instance makes a disk of an image, and knows it again.
//
// Open takes an image and a copy mode, finds the disk of an earlier start or makes one, locks its
// directory, and returns an Instance that can be served at once. It lays the disk over the image
// (disk/overlay) until that is not needed any more. What has to be copied or hashed is done beside
// the guest by Workers, which all disks of a server share. Close ends that and frees the directory.
// Sweep removes what is left of images that are gone.
//
// What it guarantees: a write that was acknowledged is there after a killed process, and what a
// Flush acknowledged is there after a crash of the machine where the disk is durable. A persistent
// disk is never given up: where it cannot be used, Open says why and changes nothing.
package instance
