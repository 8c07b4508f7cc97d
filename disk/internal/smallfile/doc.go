// Package smallfile keeps what is small with care: a file has its old or its new content, whatever
// happens, and is replaced on a full volume, too.
//
// Replace and Read are for one file; Create begins one that gets its name when it is finished; a
// Store keeps what the logical unit of a disk must remember. AcquireLock says who uses a directory.
package smallfile
