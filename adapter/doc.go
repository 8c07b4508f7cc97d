// Package adapter makes a disk from a container image: an ext4 file system in stacked qcow2 files,
// one for each layer and one for the image's configuration.
//
// The caller provides the layers' tar archives and a directory, and calls Build. Existing levels
// are not made again, because a level depends only on its layer and the layers below: two images
// with the same lower layers share files. Disk.Path is the file to serve.
//
//	layer-CHAIN.v1.qcow2   a layer, as the difference to the level below. CHAIN is the chain-id of
//	                       image-spec, config.md. v1 is the version of the format: a later one
//	                       makes other files.
//	layer-CHAIN.v1.state   the Writer's state after that level, so that the layer above can be
//	                       applied without reading those below; not every level has one
//	empty.v1.qcow2         below an image without layers
//	image-HASH.v1.qcow2    the top level: the configuration, at ConfigOffset
//
// Layers come from untrusted sources. A name in an archive is only a name in the tree that is being
// built: it creates no file on this machine, and no link is followed out of the tree. Entries that
// make no sense are refused; the error names the layer and the entry. Options bounds memory and
// time.
package adapter
