// Package durable replaces small files safely: whatever happens, a file has its old or its new
// content. That works on a full volume, too.
//
// Replace and Read are for one file; SaveRecord and LoadRecord for a file of JSON with a checksum.
// Create begins a file that gets its name when it is finished. A Store has the records of a disk's
// logical unit. AcquireLock makes one process the user of a directory.
package durable
