// Package overlay is a writable disk above a read-only image: a sparse file, and a map that says
// for each block whether its content is in the file or in the image.
//
// The caller (disk/instance) calls NewMap for a new disk or LoadMap for an existing one, then
// Map.Begin with the image, and New with the disk's file. Then it serves the Disk. Copy copies the
// rest of the image into the file while the guest works. When the caller has recorded that the disk
// is complete, Detach releases the image and the map. Close closes the file and the map. The caller
// chooses the paths, and keeps the states and the locks.
//
// If the image is far away (disk.Far), calls wait for it until their context ends. While they wait
// they hold no lock and have changed nothing. So nobody else waits for them. While they wait,
// copying is slower.
//
// A Tree has the layers of a disk with snapshots: frozen disks, one above the other. TakeSnapshot
// puts a new top above the present one while the guest writes. Layers that no snapshot needs are
// merged while the guest works. The Stack is the disk that is served: it stays while its layers
// change.
//
// Guarantees: a block is marked in the map only after its whole content is in the file, and is
// never unmarked. So an acknowledged write survives the kill of the process. With a durable map,
// what a Flush acknowledged survives a crash of the machine. In other places, a crash leaves
// earlier content or the image's. A guest's write always wins against copying.
package overlay
