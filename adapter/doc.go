// Package adapter makes a disk from a container image: an ext4 file system in stacked qcow2 files,
// one for each layer and one for the image's configuration.
//
// A caller gets the layers' tar archives from somewhere, and calls Build with a directory. Existing
// levels are not made again, because a level depends only on its layer and on those below it: two
// images with the same lower layers share files. Disk.Path is then the file to serve.
//
//	layer-CHAIN.v1.qcow2   a layer, as the difference to the level below. CHAIN is the chain-id of
//	                       image-spec, config.md. The name of the format is part of it, so that a
//	                       later one makes other files.
//	layer-CHAIN.v1.state   what was known when that level was complete, so that a layer above it is
//	                       applied without reading those below; of some levels only
//	empty.v1.qcow2         below an image without layers
//	image-HASH.v1.qcow2    the top level: the configuration, at ConfigOffset
//
// Layers come from untrusted sources. A name in an archive is only a name in the tree that is being
// built: it creates no file on this machine, and no link is followed out of the tree. What makes no
// sense is refused, with the layer and the name. Options bounds memory and time.
package adapter
