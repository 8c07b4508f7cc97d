// Package qcow2 reads and writes disk images in QEMU's qcow2 format.
//
// disk/image calls Open, then SetBacking if there is a backing file, and then reads from any number
// of goroutines. For an image that comes as a stream, it calls NewArrival, and Pass until Done. It
// calls Write to store a disk as an image of version 3, compressed or not. The adapter calls
// NewAppender, writes each block once and in any order, and calls Finish.
//
// Guarantees: Open trusts nothing of versions 2 and 3 and validates the whole image. Later reads
// cannot leave the file, follow a table into other metadata, or use more memory than the caches.
// The package opens no files itself and never changes an existing image.
//
// The file is an array of clusters, all numbers big-endian:
//
//	header        in cluster 0; see below
//	L1 table      one 8-byte entry per L2 table
//	L2 tables     one cluster each; 8 bytes per guest cluster, or 16 with subclusters
//	refcounts     a table and blocks, which reading does not need
//	data          guest clusters, or compressed ones packed at any byte
//
//	byte  0 magic "QFI\xfb"        4 version             8 backing file offset   16 its length
//	     20 cluster_bits          24 size, bytes        32 encryption           36 L1 entries
//	     40 L1 offset             48 refcount table     56 its clusters         60 snapshots
//	     72 incompatible bits     80 compatible bits    96 refcount order      100 header length
//	    104 compression type; the fields from 72 on are those of version 3
package qcow2
