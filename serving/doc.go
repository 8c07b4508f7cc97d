// Package serving has the disks that are in use, whatever protocol reaches them: which they are,
// who owns each of them, who is fenced, what peers make us keep, why requests fail, and what a
// removal waits for. The daemon adds and removes disks and hands them over. A front end, such as
// target or nbd, speaks a protocol and serves every disk by it. It keeps what only its protocol
// has, such as reservations, and must not weaken what is promised here:
//
//   - In write-exclusive mode one peer at a time uses a disk, by one protocol or several. The first
//     one that accesses it owns it until its last session has gone and its writes have left it.
//   - When HandOver returns, nothing that the former owner has sent can change the disk any more.
//   - What a peer has reserved by one protocol binds clients of all others.
//   - When Disk.Released is closed, nothing uses the disk or its store any more.
//
// A peer goes by a name: of an iSCSI initiator, of a certificate, of a socket. A session of a peer
// is a Client. A front end calls, in this order:
//
//   - Disks.Serve with its Front, before the first disk is added
//   - Connections.Accept for each portal; it calls Connection.Serve for each connection
//   - for each connection: Connections.Delay, and Admit when its peer is known, Memory.Join,
//     Memory.Receive and Memory.OpenWindow, Observer.LoginAccepted, Disks.Attach or
//     AttachIncarnation, Client.SetAddress; NewReader, if the goroutine that reads executes
//     requests
//   - for each request: Share.Get for its data, and Client.Begin. An error there is the answer. A
//     front end with rights of its own, such as SCSI's reservations, makes Begin's steps itself:
//     Client.Claim, Client.FirstUse, Disk.Begin, Disks.KeepOwner
//   - what changes the disk, or reads what it changes: Request.Lock, then Client.Permits, because a
//     fence may have come between; Ranges.Unlock afterwards
//   - Request.ReadAt, WriteAt and so on, which hold the request while content is far away, for as
//     long as Client.HoldTimeout says; Client.GaveUp if the peer ends one that waits
//   - Disk.End, then Observer.RequestDone
//   - at the end of a connection: Request.Abort for what is under way, Client.Detach, CloseWindow,
//     Share.Part, Connections.Drop, Connections.Failed if it failed, Observer.SessionEnded
//   - at the end of all: Connections.Close, and Wait
//   - in Front.Removed: UntilReleased, to answer requests that hang in the disk
//
// Only the slow path of these takes a lock or waits for the disk's store, so a request costs some
// atomic operations and no allocation.
//
// Lock order: Disk.handing, a front end's locks for a change of its state, Disks.mu, a front end's
// locks for its state. A front end calls what takes Disks.mu without holding the last ones.
package serving
