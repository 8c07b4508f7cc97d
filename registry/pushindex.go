package registry

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"

	"kubevirt.io/disk/registry/layer"
)

// indexedFile is a file of an index that is made.
type indexedFile struct {
	entry   layer.IndexFile
	digests *io.SectionReader
	from    io.ReaderAt // has the metadata; nil: it is not at hand
}

// newIndex makes the index of these files.
func newIndex(ctx context.Context, all []indexedFile) (*layer.Index, error) {
	slices.SortFunc(all, func(a, b indexedFile) int {
		return strings.Compare(a.entry.Name, b.entry.Name)
	})
	x := &layer.Index{Version: layer.IndexVersion, ChunkSize: layer.IndexChunk}
	var digests bytes.Buffer
	var tables []layer.Ranges
	complete := true
	for _, f := range all {
		f.entry.FirstChunk = int64(digests.Len() / layer.DigestSize)
		if _, err := io.Copy(&digests, f.digests); err != nil {
			return nil, err
		}
		x.Files = append(x.Files, f.entry)
		tables = append(tables, layer.Ranges{File: f.from, Ranges: f.entry.Metadata})
		complete = complete && (f.from != nil || len(f.entry.Metadata) == 0)
	}
	x.Digests = layer.SectionOf(digests.Bytes())
	if !complete {
		return x, nil
	}
	packed, err := layer.PackTables(ctx, tables)
	if len(packed) > 0 {
		x.Packed = layer.SectionOf(packed)
	}
	return x, err
}
