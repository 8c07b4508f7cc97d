// Package vhostuser serves disks to virtual machines by vhost-user-blk: a front end such as QEMU
// shares the guest's memory with this process. The process takes requests from the guest's own
// rings, reads and writes files directly into and from that memory, and notifies the guest. The
// protocol is that of QEMU's docs/interop/vhost-user, the device that of virtio 1.2, sections 2.7
// (split virtqueues) and 5.2 (block device). It is a front end upon package serving.
//
// Each disk has a socket, and a socket one connection at a time. Its goroutine, the message loop,
// executes the front end's messages: memory, rings, eventfds. Each ring has a queue, whose reader
// takes requests and executes them. Only the message loop starts and stops a queue.
//
// Neither the guest nor the front end is trusted:
//
//   - A descriptor is read once, and checked before it is used. If it breaks the rules of a ring,
//     the connection ends.
//   - An access of memory that the front end has cut short faults. Then the goroutine panics, and
//     its connection ends (debug.SetPanicOnFault). So nothing outside of this package touches such
//     memory: its data is copied. Memory that is sealed cannot be cut short, and disks read and
//     write it directly.
//   - The guest may write any memory at any time, also memory that a disk is reading into. So a
//     disk.Disk checks data only in memory of its own.
//   - An eventfd is written without a lock, because the write can wait for the front end.
//
// A request is in the region of requests in flight from when it is taken until it is given back.
// The front end keeps the region, and gives it to the next daemon, which executes those requests
// again. Nothing that was acknowledged is lost. A request that was executed and not acknowledged is
// executed twice: the guest still waits for it, so nothing that it does later depends on it.
package vhostuser
