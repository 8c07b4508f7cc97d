// Package rangelock orders accesses to ranges: of a logical unit's bytes (target/internal/scsi), or
// of a disk's blocks (disk/overlay). Two accesses that overlap and conflict have their turn in the
// order in which they asked; others never wait for each other.
//
// A caller provides the memory of its Hold, calls Set, then one of the Lock methods of the Table,
// and Unlock at the end. A hold that nobody stands in the way of costs a mutex twice, and no
// memory. What only reads goes by EnterRead and LeaveRead, which cost two atomic operations as long
// as nobody holds anything exclusively. A caller that only writes needs no more than Lock and
// Unlock.
//
// Any goroutine may call any method. No method calls out while it holds the table's mutex, but
// Drain, whose function must not use the table.
package rangelock
