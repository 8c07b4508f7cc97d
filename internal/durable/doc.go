// Package durable replaces small files safely: whatever happens, a file has its old or its new
// content. That works on a full volume, too.
//
// Replace and Read are for one file; SaveRecord and LoadRecord for one of JSON with a checksum.
// Create begins a file that gets its name when it is finished. A Store keeps the state that the
// logical unit of a disk must remember. AcquireLock makes one process the user of a directory.
package durable
