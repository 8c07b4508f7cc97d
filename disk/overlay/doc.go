// Package overlay is a writable disk over a read-only image: a sparse file, and a map that says for
// each block whether its content is in the file or in the image.
//
// The caller (disk/instance) calls NewMap for a new disk or LoadMap for an existing one, then
// Map.Begin with the image, and New with the disk's file. Then it serves the Disk. Copy copies the
// rest of the image into the file beside the guest. When the caller has recorded that the disk is
// complete, Detach releases the image and the map. Close closes the file and the map. The caller
// chooses the paths, and keeps the states and the locks.
//
// Over an image that is far away (disk.Far), calls wait for the image until their context ends.
// While they wait they hold no lock and have changed nothing. So nobody else waits for them, and
// copying gives way to them.
//
// A Tree has the layers of a disk with snapshots: frozen disks, one over another. TakeSnapshot puts
// a new top over the present one while the guest writes. What no snapshot needs is merged beside
// the guest. The Stack is the disk that stays while its layers come and go.
//
// Guarantees: a block is marked in the map only after its whole content is in the file, and is
// never unmarked. So an acknowledged write survives the kill of the process. With a durable map,
// what a Flush acknowledged survives a crash of the machine. Elsewhere a crash leaves something
// that was once written there, or the image. A guest's write always wins over copying.
package overlay
