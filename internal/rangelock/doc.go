// Package rangelock orders accesses to ranges: of a logical unit's bytes (target/internal/scsi), or
// of a disk's blocks (disk/overlay). Accesses that overlap and conflict are served first in, first
// out. Others never wait for each other.
//
// A caller provides the memory of its Hold, calls Set, then one of the Lock methods of the Table,
// and Unlock at the end. A hold without a conflict locks a mutex twice and allocates no memory.
// Reads use EnterRead and LeaveRead, which take two atomic operations as long as nobody holds
// anything exclusively. A caller that only writes needs only Lock and Unlock.
//
// Any goroutine may call any method. Drain calls its function with the table's mutex held, so that
// function must not use the table.
package rangelock
