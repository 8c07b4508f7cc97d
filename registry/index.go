package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// The index of an image says for each of its disks where it lies, and which digests its chunks
// have. It is a layer of its own, so the manifest vouches for it. docs/registry-index.md has the
// format.
const (
	// annotationIndex marks the layer in the manifest; its value is the version of the format.
	annotationIndex = "io.kubevirt.disk.index"
	indexDir        = ".kubevirt-disk" // not "disk...": CDI takes such names for a disk
	indexName       = indexDir + "/index.json"
	chunksName      = indexDir + "/sha256"
	tablesName      = indexDir + "/metadata"
	indexVersion    = 1

	// indexChunk is how many bytes one digest is for.
	indexChunk = 256 << 10
	digestSize = 32

	// The limits of an index, which comes from an untrusted source.
	maxIndexLayer = 320 << 20 // for 2 TiB of disks
	maxIndexJSON  = 32 << 20
	maxIndexFiles = 1024
	maxRanges     = 1 << 20
	maxBootRuns   = 1 << 16
	minChunk      = 4 << 10
	maxChunk      = 16 << 20
)

// index is the content of the layer. Unknown fields and files are ignored, so that later versions
// of this program can add some.
type index struct {
	Version   int         `json:"version"`
	ChunkSize int64       `json:"chunkSize"`
	Files     []indexFile `json:"files"`

	chunks []byte      // the digests, one after the other
	packed []byte      // the ranges in Metadata of all files, in order, as zstd; or nothing
	tables io.ReaderAt // the same, unpacked; nil: not unpacked, or there is none
}

// indexFile is one disk, or a backing file of one.
type indexFile struct {
	Name       string `json:"name"` // in the image, as disk/fedora.qcow2
	Size       int64  `json:"size"`
	Layer      string `json:"layer"`  // digest of the layer, which is not compressed
	Offset     int64  `json:"offset"` // of the file's first byte in the layer
	FirstChunk int64  `json:"firstChunk"`
	// Metadata are the ranges that opening reads: offset and length.
	Metadata [][2]int64 `json:"metadata,omitempty"`
	// Boot lists a guest's first reads, in order: a chunk, and how many chunks from there on.
	Boot [][2]int64 `json:"boot,omitempty"`
}

func (f *indexFile) chunks(size int64) int64 { return (f.Size + size - 1) / size }

// layer is the layer of the index. The same index always makes the same bytes.
func (x *index) layer(withDir bool) ([]byte, error) {
	text, err := json.Marshal(x)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if withDir { // unless the base image has it
		err = errors.Join(err, w.WriteHeader(tarHeader(diskDir+"/", tar.TypeDir, 0o555, 0)))
	}
	err = errors.Join(err, w.WriteHeader(tarHeader(indexDir+"/", tar.TypeDir, 0o555, 0)))
	for _, f := range []struct {
		name    string
		content []byte
	}{{indexName, text}, {chunksName, x.chunks}, {tablesName, x.packed}} {
		if f.name == tablesName && len(f.content) == 0 {
			continue
		}
		err = errors.Join(
			err,
			w.WriteHeader(tarHeader(f.name, tar.TypeReg, 0o444, int64(len(f.content)))),
		)
		if _, werr := w.Write(f.content); err == nil {
			err = werr
		}
	}
	err = errors.Join(err, w.Close())
	if err == nil && (len(text) > maxIndexJSON || b.Len() > maxIndexLayer) {
		err = errors.New("the disks are too large for one image's index")
	}
	return b.Bytes(), err
}

// readIndex reads the index of an image; nil: it has none, one of an unknown version, or one that
// does not describe all disks of the image.
func (r *resolved) readIndex(ctx context.Context) (*index, error) {
	return r.indexBy(func(desc descriptor) ([]byte, error) {
		return r.small(ctx, desc, maxIndexLayer)
	})
}

// indexBy does the same. read reads the layer of the index.
func (r *resolved) indexBy(read func(desc descriptor) ([]byte, error)) (*index, error) {
	layers := r.manifest.Layers
	i := slices.IndexFunc(layers, func(desc descriptor) bool {
		return desc.Annotations[annotationIndex] == fmt.Sprint(indexVersion)
	})
	if i < 0 {
		return nil, nil
	}
	layer, err := read(layers[i])
	var x *index
	if err == nil {
		x, err = parseIndex(layer, layers)
	}
	if err != nil {
		return nil, fmt.Errorf("index of %s: %w", r.ref, err)
	}
	known := make(map[string]bool)
	for _, f := range x.Files {
		known[f.Layer] = true
	}
	for _, above := range layers[i+1:] {
		if !known[above.Digest.String()] {
			return nil, nil // a later layer on top may have changed the disks
		}
	}
	return x, nil
}

// parseIndex reads and checks an index layer. It compares what the index says about layers with the
// manifest.
func parseIndex(layer []byte, layers []v1.Descriptor) (*index, error) {
	x := new(index)
	var text []byte
	in := bytes.NewReader(layer)
	tr := tar.NewReader(in)
	for n := 0; n < 16; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		switch path.Clean(h.Name) {
		case indexName:
			text, err = within(layer, in, h.Size)
		case chunksName:
			x.chunks, err = within(layer, in, h.Size)
		case tablesName:
			x.packed, err = within(layer, in, h.Size)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(text) > maxIndexJSON {
		return nil, fmt.Errorf("%s has more than %d bytes", indexName, maxIndexJSON)
	}
	if err := x.decode(text); err != nil {
		return nil, fmt.Errorf("%s cannot be read: %w", indexName, err)
	}
	return x, x.check(layers)
}

// within returns the next size bytes of the layer, without a copy if they are most of it: digests
// of large disks take hundreds of MiB.
func within(layer []byte, in *bytes.Reader, size int64) ([]byte, error) {
	if size < 0 || size > int64(in.Len()) {
		return nil, io.ErrUnexpectedEOF
	}
	part := layer[len(layer)-in.Len():][:size:size]
	if 2*len(part) < len(layer) {
		part = bytes.Clone(part)
	}
	return part, nil
}

// decode reads the JSON piece by piece, because two bytes of it may take a hundred in memory.
func (x *index) decode(text []byte) error {
	const depth = 4 // of a range: in ranges in a file in files in the index
	in := json.NewDecoder(&jsonBounds{from: bytes.NewReader(text), depth: depth,
		most: maxJSONPiece})
	ranges, runs := 0, 0
	return fields(in, maxJSONPiece, func(key string) (known bool, err error) {
		switch key {
		case "version":
			return true, in.Decode(&x.Version)
		case "chunkSize":
			return true, in.Decode(&x.ChunkSize)
		case "files":
			return true, elements(in, func() error {
				if len(x.Files) >= maxIndexFiles {
					return fmt.Errorf("it has more than %d files", maxIndexFiles)
				}
				x.Files = append(x.Files, indexFile{})
				return x.Files[len(x.Files)-1].decode(in, &ranges, &runs)
			})
		}
		return false, nil
	})
}

// decode reads one file. ranges and runs count those of all files.
func (f *indexFile) decode(in *json.Decoder, ranges, runs *int) error {
	pairs := func(into *[][2]int64, count *int, most int, what string) error {
		return elements(in, func() error {
			if *count++; *count > most {
				return fmt.Errorf("it has more than %d %s", most, what)
			}
			var pair [2]int64
			err := in.Decode(&pair)
			*into = append(*into, pair)
			return err
		})
	}
	return fields(in, maxJSONPiece, func(key string) (known bool, err error) {
		switch key {
		case "name":
			err = in.Decode(&f.Name)
		case "size":
			err = in.Decode(&f.Size)
		case "layer":
			err = in.Decode(&f.Layer)
		case "offset":
			err = in.Decode(&f.Offset)
		case "firstChunk":
			err = in.Decode(&f.FirstChunk)
		case "metadata":
			err = pairs(&f.Metadata, ranges, maxRanges, "ranges of metadata")
		case "boot":
			err = pairs(&f.Boot, runs, maxBootRuns, "runs of chunks that guests read first")
		default:
			return false, nil
		}
		return true, err
	})
}

// check validates every number.
func (x *index) check(layers []v1.Descriptor) error {
	switch {
	case x.Version != indexVersion:
		return fmt.Errorf("its version is %d", x.Version)
	case x.ChunkSize < minChunk || x.ChunkSize > maxChunk || x.ChunkSize&(x.ChunkSize-1) != 0:
		return fmt.Errorf("its chunks have %d bytes", x.ChunkSize)
	}
	sizes := make(map[string]int64)
	for _, l := range layers {
		sizes[l.Digest.String()] = l.Size
	}
	names := make(map[string]bool)
	known, used := int64(len(x.chunks)/digestSize), int64(0)
	for i := range x.Files {
		f := &x.Files[i]
		size, there := sizes[f.Layer]
		switch {
		case !strings.HasPrefix(f.Name, diskDir+"/") || path.Clean(f.Name) != f.Name ||
			len(f.Name) > maxName || names[f.Name]:
			return fmt.Errorf("it has a file of the name %.100q", f.Name)
		case !there:
			return fmt.Errorf("%q lies in %.100q, which is not a layer of the image",
				f.Name, f.Layer)
		case f.Size < 0 || f.Offset < 0 || f.Offset > size || f.Size > size-f.Offset:
			return fmt.Errorf("%q does not lie in its layer", f.Name)
		case f.FirstChunk < 0 || f.FirstChunk > known || f.chunks(x.ChunkSize) > known-f.FirstChunk:
			return fmt.Errorf("%q does not have as many digests as chunks", f.Name)
		}
		names[f.Name] = true
		used = max(used, f.FirstChunk+f.chunks(x.ChunkSize))
		if err := f.checkBoot(f.chunks(x.ChunkSize)); err != nil {
			return err
		}
		end := int64(0)
		for _, m := range f.Metadata {
			if m[0] < end || m[1] < 1 || m[0] > f.Size || m[1] > f.Size-m[0] {
				return fmt.Errorf("the metadata of %q does not lie in it", f.Name)
			}
			end = m[0] + m[1]
		}
	}
	if used < known { // they would only take memory
		return fmt.Errorf("it has %d digests, and its files have %d chunks", known, used)
	}
	return nil
}

// checkBoot checks the boot order against the chunks of the file. In total it may not be longer
// than the file, so it cannot take more time or memory than that.
func (f *indexFile) checkBoot(chunks int64) error {
	left := chunks
	for _, b := range f.Boot {
		if b[0] < 0 || b[1] < 1 || b[0] > chunks || b[1] > chunks-b[0] {
			return fmt.Errorf("what a guest reads first of %q does not lie in it", f.Name)
		}
		if left -= b[1]; left < 0 {
			return fmt.Errorf("what a guest reads first of %q is more than the file", f.Name)
		}
	}
	return nil
}
