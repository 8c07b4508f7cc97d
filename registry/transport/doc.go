// Package transport reads and writes the parts of container images: manifests and blobs, in
// registries, OCI layouts and archives. It does not know what is in them. The verbs of registry
// call it.
//
// ParseReference reads what names an image. A Client, made by New with what a person has set,
// opens a Source for it. Resolve finds the manifest, and each Blob is read whole or by ranges.
// An Uploader sends. A Gate says which images may be read; gate.go also finds what lies beside one.
//
// Names and the exchange of tokens are go-containerregistry's. Reading is our own:
//
//	retry.go   a request that is tried until it is done: 429 and Retry-After, tokens and signed
//	           addresses that expire, connections that break. It ends with its context, or when
//	           nothing came for too long.
//	watch.go   no exchange hangs or crawls
//	blob.go    a blob, read whole with its digest verified, or by ranges, and resumed where it was
//	spool.go   a blob of a registry that sends no ranges
//	upload.go  blobs and manifests are sent; sending.go does so in pieces
//
// A credential is never part of an error, and never sent to another host than the one that it is
// for.
package transport
