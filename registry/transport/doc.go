// Package transport reads and writes the parts of container images: manifests and blobs, in
// registries, OCI layouts and archives. It does not know their content. Package registry calls it.
//
// ParseReference parses the name of an image. A Client, made by New with a person's settings, opens
// a Source for it. Resolve finds the manifest, and each Blob is read whole or by ranges. An
// Uploader sends. A Gate says which images may be read; gate.go also finds what is stored beside an
// image.
//
// Names and the exchange of tokens are go-containerregistry's. Reading is not:
//
//	retry.go   a request that is tried until it is done: 429 and Retry-After, tokens and signed
//	           addresses that expire, connections that break. It ends with its context, or when
//	           nothing came for too long.
//	watch.go   no exchange hangs or crawls
//	blob.go    a blob, read whole with its digest verified, or by ranges, and resumed where it was
//	spool.go   a blob of a registry that sends no ranges
//	upload.go  blobs and manifests are sent; sending.go does so in pieces
//
// A credential is never part of an error, and is never sent to another host than its own.
package transport
