// Package osfile asks the operating system about files as a careful program does: calls that a
// signal interrupts are repeated, no symbolic link is followed below what an operator has named,
// and nothing blocks on a FIFO.
package osfile
