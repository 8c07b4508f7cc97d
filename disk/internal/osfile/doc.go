// Package osfile makes careful system calls on files. It repeats a call that a signal interrupts,
// follows no symbolic link below a directory that an operator has named, and never blocks on a
// FIFO.
package osfile
