// Package serving has the disks in use, and the connections of their clients, whatever protocol
// they speak: which disks there are, who owns each of them, who is fenced, which client takes over
// from which, the memory that peers make us keep, why requests wait or fail, and what a removal
// waits for. The daemon adds and removes disks and hands them over. A front end, such as target or
// nbd, serves all disks by one protocol. It keeps what only its protocol has, such as reservations,
// and must not weaken these promises:
//
//   - In write-exclusive mode one peer at a time uses a disk, by one protocol or several. The first
//     peer that accesses it owns it until its last session has ended and its writes have left it.
//   - When HandOver returns, nothing that the former owner has sent can change the disk any more.
//   - What a peer has reserved by one protocol binds clients of all others.
//   - When Disk.Released is closed, nothing uses the disk or its store any more.
//
// # How to write a front end
//
// A peer goes by a name: of an iSCSI initiator, of a certificate, of a socket (see SocketPrefix). A
// session of a peer is a Client. A front end has two types. Its server implements Front; it calls
// Disks.Serve before the first disk is added, and NewConnections with its Rules. Its connection
// embeds a Conn and implements Connection. Then, in this order:
//
//   - The server calls Connections.Accept for each portal. It begins each connection with
//     Conn.Init, has Connection.Serve called in a goroutine, limits and watches the connections
//     (Look), and pushes out peers that do not introduce themselves.
//   - Serve calls Conn.MayUse (the peer's user, at a Unix socket), Connections.AwaitPenalty (peers
//     that fail again and again), and Conn.SetDeadline until the peer has said which disk it wants.
//     Disks.Refusal is the answer while all disks are refused, as in a pod whose launcher has not
//     asked for them.
//   - When the peer is known: Connections.Admit, Disks.AttachTo with its Who, then Disk.Removed (a
//     removal that came before the client does not end its connection), Client.TakeOver,
//     Memory.Join, Memory.Receive, Conn.SetClient (so that people see whose requests wait),
//     Observer.LoginAccepted. Conn.TakeSocket makes the network faster. NewReader
//     is for a goroutine that reads and executes requests itself.
//   - For each request: Share.Get for its data, and Client.Begin, which may wait for a former
//     client of the same name. Answer the request with its error, if any. If Client.Used is true,
//     Begin does not wait. A front end with rights of its own, such as SCSI's reservations, makes
//     Begin's steps itself: Client.Claim, Client.FirstUse, Disk.Begin, Disks.KeepOwner.
//   - For a request that changes the disk, or reads the data that it changes itself: Request.Lock,
//     then Client.Permits, because of a fence or the end of the connection meanwhile (Conn.Cause);
//     Ranges.Unlock afterwards.
//   - Request.Read, WriteAt and so on, which hold the request while content is far away, for as
//     long as Client.HoldTimeout says; Client.GaveUp if the peer ends a request that waits.
//   - Disk.End, Disk.Worked or Disk.Failed, Observer.RequestDone. A goroutine of its own for a
//     request counts with Conn.Add and Done.
//   - At the end of a connection, for whatever reason: Conn.Fail, Request.Abort for what is under
//     way, Client.Detach, Share.Part, Connections.Drop, Connections.Ended (or Failed, for a
//     refused login), Observer.SessionEnded or LoginRefused.
//   - Connections.Sessions and Kick are the server's; Connections.Drain is its end.
//   - Front.Removed and Fencing.Finish end connections or requests (Connections.All). UntilReleased
//     is for those that hang in a removed disk.
//
// Only the slow path of these takes a lock or waits for the disk's store, so a request costs some
// atomic operations and no allocation.
//
// Lock order: Disk.handing, a front end's locks for a change of its state, Disks.mu, a front end's
// locks for its state. A front end calls what takes Disks.mu without holding the last ones.
package serving
