// Package volumes makes the disks of volumes on demand, and answers requests for them.
//
// A daemon makes Volumes by New before it finds its own images, since Holds says which numbers
// volumes have. When its own disks are LUNs, Serve makes LUNs of the volumes, and Answer begins to
// answer requests. Close ends requests before the disks are closed. What a volume is, and what
// requests mean, is package volume's; here it gets a disk among those that are served.
package volumes
