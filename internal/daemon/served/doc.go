// Package served has the disks of a daemon while they are served.
//
// A daemon makes one Disks. Start opens the disks of a plan and ServeAll makes them LUNs; Open,
// Serve, Withdraw and Remove do the same for single disks that come and go, which are those of
// volumes. Flush and Close end all of them. Any number of goroutines may call its methods.
//
// It guarantees that a number has one disk at a time, that nobody uses a disk that is closed, that
// no disk comes or goes once Close has begun, and that Flush returns nil only if no data is lost
// that an initiator was told is durable. What a page shows of disks, their space and the storages
// that they lie on comes from Status and the metrics, which never wait long for storage.
package served
