// Package adapter makes a container image a disk: an ext4 file system in stacked qcow2 files, one
// for each layer and one for the image's configuration.
//
// A caller has the layers' tar archives from somewhere, and calls Build with a directory. What is
// there already is not made again, as a level depends only on its layer and on those below it: two
// images with the same lower layers share files. Disk.Path is what is then served.
//
//	layer-CHAIN.v1.qcow2   a layer, as the difference to the level below. CHAIN is the chain-id of
//	                       image-spec, config.md. The name of the format is part of it, so that a
//	                       later one makes other files.
//	layer-CHAIN.v1.state   what was known when that level was complete, so that a layer above it is
//	                       applied without reading those below; of some levels only
//	empty.v1.qcow2         below an image without layers
//	image-HASH.v1.qcow2    the top level: the configuration, at ConfigOffset
//
// Layers come from strangers. A name in an archive is only ever a name in the tree that is being
// built: no file is created by it, and no link is followed out of it. What cannot be is refused
// with the layer and the name. Memory and time are bounded by Options.
package adapter
