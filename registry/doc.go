// Package registry moves disk images into container registries and out of them.
//
// A Client, made by New with what a person has set, is used by one command. ParseReference reads
// what names an image: in a registry, in an OCI layout or in an archive that docker saved. Push
// stores disks as an image. Pull fetches the disk out of any image that has one in /disk.
//
// Names, credentials of docker and the exchange of tokens are go-containerregistry's. Reading is
// our own:
//
//	retry.go   a request that is tried until it is done: 429 and Retry-After, tokens and signed
//	           addresses that expire, connections that break. It ends with its context, or when
//	           nothing came for too long.
//	blob.go    a blob, read whole with its digest verified, or by ranges, and resumed where it was
//	layer.go   a layer, uncompressed: its tar archive, and what it hides of the layers below it
//	pull.go    the disks of an image, each written as its layer passes
//	push.go    the base's layers, an index, and a layer for each file; upload.go sends them
//	index.go   what the index says, and how it is checked
//	stream.go  the disks of an image, read as they are needed: far.go through the digests of the
//	           index and the cache, pulled.go of an image without an index
//	kept.go    which image a tag named at first, and what tells where its disks lie
//
// What comes from a registry comes from strangers: sizes, counts and names are bounded before
// anything is made of them, and nothing gets its final name before the digest of its layer was
// right. A credential is never part of an error, and never sent to another host than the one that
// it is for.
package registry
