// Package vhostuser serves disks to virtual machines by vhost-user-blk: a front end such as QEMU
// shares the guest's memory with this process, which takes requests from the guest's own rings,
// reads and writes files straight into and from that memory, and rings the guest. The protocol is
// that of QEMU's docs/interop/vhost-user, the device that of virtio 1.2, sections 2.7 (split
// virtqueues) and 5.2 (block device). It is a front end upon package serving.
//
// Each disk has a socket, and a socket one connection at a time. Its goroutine, the message loop,
// does what the front end says: memory, rings, eventfds. Each ring has a queue, whose reader takes
// requests and executes them. A queue is started and stopped by the message loop only.
//
// Neither the guest nor the front end is trusted:
//
//   - A descriptor is read once, and checked before it is used. What breaks the rules of a ring
//     ends the connection.
//   - Memory that the front end can cut short faults. Then the goroutine panics, and its
//     connection ends (debug.SetPanicOnFault). So nothing outside of this package touches such
//     memory: its data is copied. Memory that is sealed cannot be cut short, and disks read and
//     write it themselves.
//   - The guest may write any memory at any time, also what a disk is just reading into. That is a
//     rule for every disk.Disk: what it checks is memory of its own.
//   - An eventfd is written without a lock, because a write of it can wait for the front end.
//
// A request that was taken stands in the region of requests in flight until it was given back. The
// front end keeps the region, and gives it to the next daemon, which executes those requests again.
// Nothing that was acknowledged is lost. A request that was executed and not acknowledged is
// executed twice: the guest still waits for it, so nothing that it does later depends on it.
package vhostuser
