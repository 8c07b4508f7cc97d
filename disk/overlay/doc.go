// Package overlay is the writable disk over a read-only image: a sparse file of the disk's own, and
// a map that says for each block which of the two has its content.
//
// Who opens a disk (disk/instance) calls NewMap for a new disk or LoadMap for an existing one, then
// Map.Begin with the image, and New with the disk's file. From then on the Disk is served. Copy
// brings the rest of the image into the file beside the guest; after that, when it is recorded
// somewhere that the disk is complete, Detach lets go of the image and of the map. Close closes the
// file and the map. Paths, states and locks are the caller's.
//
// Over an image that is far away, Served is a disk.Distant: its calls wait for the image as long as
// a context lasts. They hold no lock and have changed nothing while they do, so that nobody else
// waits for them, and copying gives way to them.
//
// What it guarantees: a block is marked in the map only after its whole content is in the file, and
// is never unmarked. So a write that was acknowledged is there after a killed process; with a
// durable map, what a Flush acknowledged is there after a crash of the machine. A crash leaves of
// anything else what was once written there, or the image. A guest's write always wins over
// copying.
package overlay
