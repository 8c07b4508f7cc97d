// Package store keeps on disk which volumes there are: a directory with a record for each, and the
// numbers of their LUNs.
//
//	DIR/lock                which process uses it
//	DIR/numbers.json        the numbers that may have been given, and the store's own name
//	DIR/NAME/volume.json    the record of the volume NAME
//	DIR/NAME/...            its disk, unless that is elsewhere; not this package's
//
// Open locks the directory, and Load returns the records. Make begins a volume, Save changes its
// record, Remove ends it. A record is replaced in one step and has reached storage when a call
// returns. So after a kill or a crash a volume is as the last call left it.
//
// A record is written before every other file of its volume, and removed after them. So every file
// has a record that says whose it is, and Load removes only empty directories.
//
// The number of a LUN is given again only when all others have been given. An initiator may come
// back after a restart to the number of a deleted disk, and must not write to another one.
package store
