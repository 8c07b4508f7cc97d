// Package registry moves disk images into container registries and out of them. The commands and
// the daemon call it, with a Client that New makes. Below it are layer, for the content of layers,
// and transport, which moves blobs.
//
// Push stores disks as an image. Pull fetches the disk out of any image that has one in /disk.
// Stream serves the disks of an image while they are fetched. Container reads a whole image.
//
//	pull.go    the disks of an image, each written as its layer passes
//	push.go    the base's layers, an index, and a layer for each file
//	stream.go  the disks of an image, read as they are needed: far.go through the digests of the
//	           index and the cache, packed.go of compressed layers, unverified.go before a digest
//	           was checked, fetched.go of an image that was fetched first
//	kept.go    which image a tag named at first, and the records of where its disks lie
//
// Nothing gets its final name, and no read ends, before the digest of the fetched content was
// right, unless a person has chosen to trust TLS until then.
package registry
