package registry

import "kubevirt.io/disk/registry/layer"

type (
	index     = layer.Index
	indexFile = layer.IndexFile
	layerList = layer.List
)

var (
	chunkDigests = layer.ChunkDigests
	indexBy      = layer.IndexBy
	newShadow    = layer.NewShadow
	openLayer    = layer.Open
	parseIndex   = layer.ParseIndex
	readIndex    = wholeIndex
	readTOC      = layer.ReadTOC
	readTar      = layer.ReadTar
	sectionOf    = layer.SectionOf
	under        = layer.Under
)

const (
	annotationIndex = layer.AnnotationIndex
	digestSize      = layer.DigestSize
	diskDir         = layer.DiskDir
	indexChunk      = layer.IndexChunk
	indexVersion    = layer.IndexVersion
	maxIndexLayer   = layer.MaxIndexLayer
	maxShown        = layer.MaxShown
	maxTOCChunks    = layer.MaxTOCChunks
	mediaDisk       = layer.MediaDisk
	mediaEmpty      = layer.MediaEmpty
)
