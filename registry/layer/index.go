package layer

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/transport"
)

// The index of an image says for each of its disks where it lies, and the digests of its chunks. It
// is a layer of its own, so the manifest vouches for it. docs/registry-index.md has the format.
const (
	// AnnotationIndex marks the layer in the manifest; its value is the version of the format.
	AnnotationIndex = "io.kubevirt.disk.index"
	indexDir        = ".kubevirt-disk" // not "disk...": CDI takes such names for a disk
	indexName       = indexDir + "/index.json"
	chunksName      = indexDir + "/sha256"
	tablesName      = indexDir + "/metadata"
	IndexVersion    = 1

	// IndexChunk is how many bytes one digest is for.
	IndexChunk = 256 << 10
	DigestSize = 32

	// The limits of an index, which comes from an untrusted source.
	MaxIndexLayer = 320 << 20 // for 2 TiB of disks
	maxIndexJSON  = 32 << 20
	MaxIndexFiles = 1024
	MaxRanges     = 1 << 20
	maxBootRuns   = 1 << 16
	minChunk      = 4 << 10
	maxChunk      = 16 << 20
)

// Index is the content of the layer. Unknown fields and files are ignored, so that later versions
// of this program can add some.
type Index struct {
	Version   int         `json:"version"`
	ChunkSize int64       `json:"chunkSize"`
	Files     []IndexFile `json:"files"`

	// Digests are the digests of the chunks, one after the other. They may take hundreds of MiB, so
	// they stay in the file.
	Digests *io.SectionReader `json:"-"`
	Packed  *io.SectionReader `json:"-"` // all ranges in Metadata, by file, as zstd; nil: none
	Tables  *os.File          `json:"-"` // Packed, decompressed; nil: not yet, or there is none
	file    *os.File          // has digests and packed; nil: they are in memory
}

// IndexFile is one disk, or a backing file of one.
type IndexFile struct {
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

func (f *IndexFile) Chunks(size int64) int64 { return (f.Size + size - 1) / size }

// Layer is the layer of the index. The same index always makes the same bytes.
func (x *Index) Layer(withDir bool) ([]byte, error) {
	text, err := json.Marshal(x)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if withDir { // unless the base image has the directory
		err = errors.Join(err, w.WriteHeader(tarHeader(DiskDir+"/", tar.TypeDir, 0o555, 0)))
	}
	err = errors.Join(err, w.WriteHeader(tarHeader(indexDir+"/", tar.TypeDir, 0o555, 0)))
	for _, f := range []struct {
		name    string
		content *io.SectionReader
	}{{indexName, SectionOf(text)}, {chunksName, x.Digests}, {tablesName, x.Packed}} {
		if f.content == nil {
			continue
		}
		err = errors.Join(err,
			w.WriteHeader(tarHeader(f.name, tar.TypeReg, 0o444, f.content.Size())))
		if _, werr := io.Copy(w, f.content); err == nil {
			err = werr
		}
	}
	err = errors.Join(err, w.Close())
	if err == nil && (len(text) > maxIndexJSON || b.Len() > MaxIndexLayer) {
		err = errors.New("the disks are too large for one image's index")
	}
	return b.Bytes(), err
}

// IndexBy finds the layer of the index, calls read with it, and checks that it describes all disks.
func IndexBy(r *transport.Image, read func(desc descriptor) (*Index, error)) (*Index, error) {
	layers := r.Manifest.Layers
	i := slices.IndexFunc(layers, func(desc descriptor) bool {
		return desc.Annotations[AnnotationIndex] == fmt.Sprint(IndexVersion)
	})
	if i < 0 {
		return nil, nil
	}
	x, err := read(layers[i])
	if err != nil {
		return nil, fmt.Errorf("index of %s: %w", r.Ref, err)
	}
	known := make(map[string]bool)
	for _, f := range x.Files {
		known[f.Layer] = true
	}
	for _, above := range layers[i+1:] {
		if !known[above.Digest.String()] {
			return nil, x.Close() // a later layer on top may have changed the disks
		}
	}
	return x, nil
}

// ParseIndex parses and checks an index layer. It compares what the index says about layers with
// the manifest. It copies the whole layer to keep, where the digests and tables are read later.
func ParseIndex(layer io.Reader, layers []v1.Descriptor, keep *os.File) (*Index, error) {
	x := &Index{Digests: SectionOf(nil), file: keep}
	if err := keep.Truncate(0); err != nil {
		return nil, err
	}
	layer = io.TeeReader(layer, io.NewOffsetWriter(keep, 0))
	var text []byte
	in := &Counter{Reader: layer}
	tr := tar.NewReader(in)
	digests := int64(0)
	for range 16 {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		switch name := path.Clean(h.Name); {
		case name == indexName:
			if text, err = bounded.Read(tr, maxIndexJSON); err != nil {
				return nil, fmt.Errorf("%s has %w", indexName, err)
			}
		case name == chunksName:
			digests = h.Size / DigestSize
			x.Digests = io.NewSectionReader(keep, in.N, h.Size)
		case name == tablesName && h.Size > 0:
			x.Packed = io.NewSectionReader(keep, in.N, h.Size)
		}
	}
	if _, err := io.Copy(io.Discard, layer); err != nil {
		return nil, err
	}
	if err := x.decode(text); err != nil {
		return nil, fmt.Errorf("%s cannot be read: %w", indexName, err)
	}
	return x, x.check(layers, digests)
}

// Counter counts what was read.
type Counter struct {
	io.Reader
	N int64 // bytes
}

func (c *Counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.N += int64(n)
	return n, err
}

// SectionOf makes bytes look like a part of a file.
func SectionOf(p []byte) *io.SectionReader {
	return io.NewSectionReader(bytes.NewReader(p), 0, int64(len(p)))
}

// Close closes the files of an index, if there are any.
func (x *Index) Close() (err error) {
	if x == nil {
		return nil
	}
	for _, f := range []*os.File{x.file, x.Tables} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// decode decodes the JSON piece by piece, because two bytes of it may take a hundred in memory.
func (x *Index) decode(text []byte) error {
	const depth = 4 // of a range: in ranges in a file in files in the index
	in := json.NewDecoder(&bounded.JSON{From: bytes.NewReader(text), Depth: depth,
		Most: bounded.MaxPiece})
	ranges, runs := 0, 0
	return bounded.Fields(in, bounded.MaxPiece, func(key string) (known bool, err error) {
		switch key {
		case "version":
			return true, in.Decode(&x.Version)
		case "chunkSize":
			return true, in.Decode(&x.ChunkSize)
		case "files":
			return true, bounded.Elements(in, func() error {
				if len(x.Files) >= MaxIndexFiles {
					return fmt.Errorf("it has more than %d files", MaxIndexFiles)
				}
				x.Files = append(x.Files, IndexFile{})
				return x.Files[len(x.Files)-1].decode(in, &ranges, &runs)
			})
		}
		return false, nil
	})
}

// decode reads one file. ranges and runs count those of all files.
func (f *IndexFile) decode(in *json.Decoder, ranges, runs *int) error {
	pairs := func(into *[][2]int64, count *int, most int, what string) error {
		return bounded.Elements(in, func() error {
			if *count++; *count > most {
				return fmt.Errorf("it has more than %d %s", most, what)
			}
			var pair [2]int64
			err := in.Decode(&pair)
			*into = append(*into, pair)
			return err
		})
	}
	return bounded.Fields(in, bounded.MaxPiece, func(key string) (known bool, err error) {
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
			err = pairs(&f.Metadata, ranges, MaxRanges, "ranges of metadata")
		case "boot":
			err = pairs(&f.Boot, runs, maxBootRuns, "runs of chunks that guests read first")
		default:
			return false, nil
		}
		return true, err
	})
}

// Check validates every number. known is how many digests the index has.
func (x *Index) check(layers []v1.Descriptor, known int64) error {
	switch {
	case x.Version != IndexVersion:
		return fmt.Errorf("its version is %d", x.Version)
	case x.ChunkSize < minChunk || x.ChunkSize > maxChunk || x.ChunkSize&(x.ChunkSize-1) != 0:
		return fmt.Errorf("its chunks have %d bytes", x.ChunkSize)
	}
	sizes := make(map[string]int64)
	for _, l := range layers {
		sizes[l.Digest.String()] = l.Size
	}
	names := make(map[string]bool)
	used := int64(0)
	for i := range x.Files {
		f := &x.Files[i]
		size, there := sizes[f.Layer]
		switch {
		case !strings.HasPrefix(f.Name, DiskDir+"/") || path.Clean(f.Name) != f.Name ||
			len(f.Name) > MaxName || names[f.Name]:
			return fmt.Errorf("it has a file of the name %.100q", f.Name)
		case !there:
			return fmt.Errorf("%q lies in %.100q, which is not a layer of the image",
				f.Name, f.Layer)
		case f.Size < 0 || f.Offset < 0 || f.Offset > size || f.Size > size-f.Offset:
			return fmt.Errorf("%q does not lie in its layer", f.Name)
		case f.FirstChunk < 0 || f.FirstChunk > known || f.Chunks(x.ChunkSize) > known-f.FirstChunk:
			return fmt.Errorf("%q does not have as many digests as chunks", f.Name)
		}
		names[f.Name] = true
		used += f.Chunks(x.ChunkSize)
		if err := f.CheckBoot(f.Chunks(x.ChunkSize)); err != nil {
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
	if used != known { // each file takes memory for its chunks, and each digest, too
		return fmt.Errorf("it has %d digests, and its files have %d chunks", known, used)
	}
	return nil
}

// CheckBoot checks the boot order against the chunks of the file. In total it may not be longer
// than the file, which bounds its time and memory.
func (f *IndexFile) CheckBoot(chunks int64) error {
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
