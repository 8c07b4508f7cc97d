// Package osfile makes careful system calls on files. It repeats a call that a signal interrupts,
// follows no symbolic link below a directory that an operator has named, and never blocks on a
// FIFO.
//
// Every package of disks that uses files calls it. Its functions keep no state, so any goroutine
// may call any of them at any time.
package osfile
