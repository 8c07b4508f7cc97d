// Package disktest has the tools to test a Disk, for the tests of this module only.
//
// Run is the suite that every Disk must pass. A test calls it for each kind of disk, with a
// function that opens a new one. Memory is a disk in memory, to compare with or to serve in tests.
// Fault fails or delays chosen calls of another disk. NewStore makes a store for the logical unit
// of either. Tools for files are in filetest.
package disktest
