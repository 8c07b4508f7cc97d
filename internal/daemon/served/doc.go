// Package served has the disks of a daemon while they are served.
//
// A daemon makes one Disks. Start opens the disks of a plan and ServeAll makes them LUNs; Open,
// Serve, Withdraw and Remove do the same for single disks, which are those of volumes. Flush and
// Close end all of them. Any number of goroutines may call its methods.
//
// It guarantees that a number has one disk at a time, that nobody uses a closed disk, that no disk
// is added or removed once Close has begun, and that Flush returns nil only if no data is lost that
// was acknowledged as durable. Status and the metrics show disks, their space and their storages,
// and never wait long for storage.
package served
