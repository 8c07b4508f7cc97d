// Package serving has the disks that are in use, whatever protocol reaches them: which they are,
// who owns each of them, who is fenced, and what a removal waits for. The daemon adds and removes
// disks and hands them over. A front end, such as target, speaks a protocol and serves every disk
// by it. It keeps what only its protocol has, such as reservations, and must not weaken what is
// promised here:
//
//   - In write-exclusive mode one peer at a time uses a disk, by one protocol or several. The first
//     one that accesses it owns it until its last session has gone and its writes have left it.
//   - When HandOver returns, nothing that the former owner has sent can change the disk any more.
//   - When Disk.Released is closed, nothing uses the disk or its store any more.
//
// A peer goes by a name: of an iSCSI initiator, of a certificate, of a socket. A session of a peer
// is a Client. Each request of a client asks Client.Claim first, then Disk.Begin, uses the disk by
// the methods of its Request, and ends with Disk.End. Only Claim's slow path takes a lock, so a
// request costs some atomic operations.
//
// Lock order: Disk.handing, a front end's locks for a change of its state, Disks.mu, a front end's
// locks for its state. A front end calls what takes Disks.mu without holding the last ones.
package serving
