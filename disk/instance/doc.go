// Package instance makes a disk from an image and recognises it at the next start.
//
// Open takes an image and a copy mode. It finds the disk of an earlier start or makes one, locks
// its directory, and returns an Instance that can be served at once. It puts the disk above the
// image (disk/overlay) for as long as the disk needs the image. All disks of a server share
// Workers, which copy and hash in the background. Close ends that and releases the directory. Sweep
// removes the disks of images that are gone.
//
// Guarantees: an acknowledged write survives the kill of the process. If the disk is durable, what
// a Flush acknowledged survives a crash of the machine. A persistent disk is never discarded: if it
// cannot be used, Open says why and changes nothing.
package instance
