// Package volumes makes the disks of volumes on demand, and answers requests for them.
//
// A daemon makes Volumes by New before it finds its own images, because Holds has the numbers of
// volumes. When its own disks are LUNs, Serve makes LUNs of the volumes, and Answer begins to
// answer requests. Close ends requests before the disks are closed. Package volume decides what a
// volume is and what requests mean; this package makes its disk one of those that are served.
package volumes
