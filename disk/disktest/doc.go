// Package disktest has what every Disk is tested with, for the tests of this module only.
//
// Run is the suite that a Disk must pass: a test gives it a function that opens a new one, and
// calls it for each kind of disk that it makes. Memory is a disk in memory, to compare with or to
// serve in tests; Fault fails or delays chosen calls of another disk; NewStore is a store for the
// logical unit of either. What such a test needs of files is in filetest.
package disktest
