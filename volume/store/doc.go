// Package store keeps on disk which volumes there are: a directory for each, with a record, and the
// numbers of their LUNs.
//
//	DIR/lock                which process uses it
//	DIR/numbers.json        the numbers that may have been given, and the store's own name
//	DIR/NAME/volume.json    the record of the volume NAME
//	DIR/NAME/...            its disk, unless that is elsewhere; not this package's
//
// Open locks the directory, and Load returns the records. Make begins a volume, Save changes its
// record, Remove ends it. A record is replaced in one step and has reached storage when a call
// returns, so that after a kill or a crash a volume is what the last call has made of it.
//
// A record comes before every other file of its volume, and goes after them. So no file is ever
// without a record that says whose it is, and Load removes nothing but empty directories.
//
// The number of a LUN is given again only when all others have been given: an initiator may come
// back after a restart to the number of a disk that was deleted, and must not write to another one.
package store
