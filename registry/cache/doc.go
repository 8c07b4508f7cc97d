// Package cache keeps on disk what was fetched of blobs, so that nothing is fetched twice: not by
// readers of one process, not by several daemons of a node that share the directory, and not after
// a restart. It knows nothing of registries: a blob is named by its digest, and a function brings
// its bytes.
//
// Who serves a blob calls Open once for the directory, Cache.Blob for each blob, then Blob.ReadAt
// from any number of goroutines, and Cache.Close at the end, when no call is under way any more.
//
// What it guarantees: bytes that were not checked are never handed out. A chunk is checked when it
// has been fetched, and once more when a process first uses it from the directory. A directory that
// cannot be written, is full or is damaged costs speed, never content. Removing what was used
// longest ago never changes what a reader gets.
//
// A blob is cut into chunks, and the chunks are kept in segments of SegmentSize:
//
//	DIR/v1/DIGEST/CHUNK SIZE/SEGMENT   header, then the segment's bytes; sparse
//	DIR/v1/lock                        held by the process that removes segments
package cache
