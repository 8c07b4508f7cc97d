// Package zstdenc compresses clusters of disk images, each to a zstd frame of its own (RFC 8878).
//
// A cluster has at most 64 KiB, and nothing is kept from one to the next. So positions take 16
// bits, all tables stay in a processor's own cache, and what is made of a cluster depends on
// nothing else: not on the machine, and not on what was compressed before. The matches are those
// of libzstd's default level, or nearly.
//
//	frame      magic, one byte, size | one block
//	block      3 bytes of its kind and length | literals | sequences
//	literals   header, Huffman tree and one or four streams; or the bytes as they are
//	sequences  how many there are, three tables, and bits that are read from their end
//
// The caller has an Encoder for each of its goroutines, and calls Encode for one cluster after the
// other. Its loops are marked go:norace, because the race detector would take most of a test's time
// there. It watches Encode, so it still finds two goroutines with one Encoder.
package zstdenc
