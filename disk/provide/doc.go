// Package provide makes a file from a disk image in a directory that others share, such as the
// virtual machine's QEMU.
//
// Provide makes the file, or finds the file of an earlier run that was killed. Gone tells whether
// the file still has its name. Remove removes it. A run holds a lock next to the file, so two runs
// never provide the same one.
//
// Guarantees: under its name the file is complete and durable, or absent. This package neither
// overwrites nor removes files that it has not made. The image is never changed.
package provide
