// Package store keeps the records of volumes on disk: a directory with a record for each volume,
// and the numbers of their LUNs.
//
//	DIR/lock                names the process that uses it
//	DIR/numbers.json        the numbers that may have been given, and the store's own name
//	DIR/NAME/volume.json    the record of the volume NAME
//	DIR/NAME/...            its disk, unless that is elsewhere; not of this package
//
// Open locks the directory, and Load returns the records. Make begins a volume, Save changes its
// record, Remove ends it. A record is replaced in one step and is on storage when a call returns.
// So after a kill or a crash, a volume is as the last call left it.
//
// A record is written before every other file of its volume, and removed after them. So every file
// has a record that says whose it is, and Load removes only empty directories.
//
// A LUN's number is reused only after all others of its range: those up to 255, or those above,
// which are used when all lower ones are taken. After a restart, an initiator may come back to the
// number of a deleted disk, and must not write to another one.
package store
