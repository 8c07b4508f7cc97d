// Package cache keeps fetched parts of blobs on disk, so that nothing is fetched twice: not by
// several readers of one process, not by several daemons of a node that share the directory, and
// not after a restart. It knows nothing of registries: a blob is named by its digest, and a
// function returns its bytes.
//
// A server of blobs calls Open once for the directory, Cache.Blob for each blob, then Blob.ReadAt
// from any number of goroutines, and Cache.Close at the end, when no other call is under way.
//
// It guarantees that unchecked bytes are never returned. A chunk is checked after it was fetched,
// and again when a process first uses it from the directory. If the directory cannot be written, is
// full or is damaged, reads become slower, but never wrong. Removing the segments that were unused
// for longest never changes what a reader gets.
//
// A blob is cut into chunks, and the chunks are kept in segments of segmentSize:
//
//	DIR/v1/DIGEST/CHUNK SIZE/SEGMENT   header, then the segment's bytes; sparse
//	DIR/v1/lock                        held by the process that removes segments
package cache
