package layer

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/transport"
)

// Some layers are compressed in chunks, with a table of contents at their end. The manifest has the
// digest of the table, and the table that of each chunk. So such a layer can be read by ranges.
const (
	// annotationStargz is the digest of an eStargz table of contents, as JSON.
	annotationStargz = "containerd.io/snapshot/stargz/toc.digest"
	stargzName       = "stargz.index.json"
	stargzFooter     = 51 // bytes at the end of the layer
	stargzMagicAt    = 32
	stargzMagic      = "STARGZ"

	// annotationChunked is the digest of a stored zstd:chunked table of contents, and
	// annotationPlace says where it lies: offset, length, length as JSON, and 1.
	annotationChunked    = "io.github.containers.zstd-chunked.manifest-checksum"
	annotationPlace      = "io.github.containers.zstd-chunked.manifest-position"
	annotationOldChunked = "io.containers.zstd-chunked.manifest-checksum"
	annotationOldPlace   = "io.containers.zstd-chunked.manifest-position"

	// The limits of a table, which comes from an untrusted source.
	maxPackedTOC = 64 << 20  // bytes, as it is stored
	maxTOC       = 256 << 20 // bytes, as JSON
	MaxTOCChunks = 1 << 19   // of the files of an image under the directory of the disks
)

// HasTOC reports whether the layer claims to have a table of contents that the manifest vouches
// for.
func HasTOC(desc descriptor) bool {
	a := desc.Annotations
	return a[annotationStargz] != "" || a[annotationChunked] != "" || a[annotationOldChunked] != ""
}

// tocTries is how often a table with a wrong digest is fetched.
const tocTries = 3

// ReadContents reads the table of contents of a layer. left is how many chunks the image may still
// have. wrong is called when a table has another digest, and is fetched again.
func ReadContents(ctx context.Context, layer *transport.Blob, left int,
	wrong func(error)) (l *Contents, err error) {
	desc := layer.Desc
	for range tocTries {
		if desc.Annotations[annotationStargz] != "" {
			l, err = stargzTOC(ctx, layer, left)
		} else {
			l, err = chunkedTOC(ctx, layer, left)
		}
		if !errors.As(err, new(*transport.DigestError)) {
			break
		}
		wrong(err)
	}
	return l, err
}

// stargzTOC reads the table of an eStargz layer: a tar archive in a gzip member of its own. The
// last bytes of the layer say where it begins.
func stargzTOC(ctx context.Context, layer *transport.Blob, left int) (*Contents, error) {
	foot := make([]byte, stargzFooter)
	begin := layer.Desc.Size - stargzFooter
	if begin <= 0 {
		return nil, &Unsuited{"has no table of contents, although it is said to"}
	}
	if _, err := layer.ReadAt(ctx, foot, begin); err != nil {
		return nil, err
	}
	at, err := strconv.ParseInt(string(foot[stargzMagicAt-16:stargzMagicAt]), 16, 64)
	if err != nil || !bytes.HasPrefix(foot[stargzMagicAt:], []byte(stargzMagic)) || at <= 0 ||
		at >= begin {
		return nil, &Unsuited{"has no table of contents, although it is said to"}
	}
	if begin-at > maxPackedTOC {
		return nil, &Unsuited{"has a table of contents that is too large"}
	}
	return tableIn(ctx, layer, at, begin-at, func(packed []byte) (*Contents, error) {
		want := layer.Desc.Annotations[annotationStargz]
		text, err := stargzJSON(packed)
		if err != nil { // it may have been changed on its way
			return nil, &transport.DigestError{Want: want, Got: "none: " + err.Error()}
		}
		return ReadTOC(text, want, layer.Desc, at, codecGzip, left)
	})
}

// tableIn parses a part of the layer. An endpoint that has sent a table with another digest is
// asked last from then on.
func tableIn(ctx context.Context, layer *transport.Blob, at, length int64,
	parse func(packed []byte) (*Contents, error)) (l *Contents, err error) {
	packed := make([]byte, length)
	once := sync.OnceFunc(func() { l, err = parse(packed) })
	if err := layer.FillChecked(ctx, packed, at, func() error {
		if once(); errors.As(err, new(*transport.DigestError)) {
			return err
		}
		return nil
	}); err != nil {
		return nil, err
	}
	once()
	return l, err
}

// stargzJSON is the table in its archive.
func stargzJSON(packed []byte) (io.Reader, error) {
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	tr := tar.NewReader(io.LimitReader(z, maxTOC+TarBlock))
	h, err := tr.Next()
	if err == nil && path.Clean(h.Name) != stargzName {
		err = fmt.Errorf("%.100q instead of it", h.Name)
	}
	return tr, err
}

// chunkedTOC reads the table of a zstd:chunked layer.
func chunkedTOC(ctx context.Context, layer *transport.Blob, left int) (*Contents, error) {
	want, place := layer.Desc.Annotations[annotationChunked],
		layer.Desc.Annotations[annotationPlace]
	if want == "" {
		want, place = layer.Desc.Annotations[annotationOldChunked],
			layer.Desc.Annotations[annotationOldPlace]
	}
	var at, length, plain, kind int64
	n, _ := fmt.Sscanf(place, "%d:%d:%d:%d", &at, &length, &plain, &kind)
	switch size := layer.Desc.Size; {
	case n != 4 || kind != 1 || at <= 0 || length <= 0 || at > size || length > size-at:
		return nil, &Unsuited{fmt.Sprintf("has its table of contents at %.100q", place)}
	case length > maxPackedTOC || plain > maxTOC:
		return nil, &Unsuited{"has a table of contents that is too large"}
	}
	return tableIn(ctx, layer, at, length, func(packed []byte) (*Contents, error) {
		if err := transport.CheckDigest(packed, want); err != nil {
			return nil, err
		}
		z, err := zstd.NewReader(bytes.NewReader(packed),
			zstd.WithDecoderMaxWindow(maxZstdWindow), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, err
		}
		defer z.Close()
		return ReadTOC(io.LimitReader(z, maxTOC), "", layer.Desc, at, codecZstd, left)
	})
}

// tocEntry is one entry of either kind of table.
type tocEntry struct {
	Name        string `json:"name"`
	Type        string `json:"type"`
	LinkName    string `json:"linkName"`
	Size        int64  `json:"size"`
	Digest      string `json:"digest"`
	Offset      int64  `json:"offset"`    // in the layer, of the compressed data
	EndOffset   int64  `json:"endOffset"` // of the last chunk; zstd:chunked only
	InnerOffset int64  `json:"innerOffset"`
	ChunkOffset int64  `json:"chunkOffset"` // in the file
	ChunkSize   int64  `json:"chunkSize"`   // 0: up to the file's end
	ChunkDigest string `json:"chunkDigest"`
	ChunkType   string `json:"chunkType"` // of zstd:chunked: chunkZeros, or data
}

const chunkZeros = "zeros"

// maxHole is how many zeros one entry of part.Table is for. Bytes.
const maxHole = 1 << 30

// tocReader makes contents of the entries of a table, in their order.
type tocReader struct {
	desc  descriptor
	codec string
	l     *Contents
	n     int   // entries so far
	left  int   // chunks that may still come
	at    int64 // offset in the layer of the chunk before
	limit int64 // offset at which chunks end at the latest

	file  *Part        // the file of the next chunks; nil: it is not needed
	whole *tocEntry    // of file
	table []TableChunk // of file
	done  int64        // bytes of file
}

// ReadTOC parses a table, whose digest is want unless that is "". end is where the chunks end, and
// left how many there may be.
func ReadTOC(text io.Reader, want string, desc descriptor, end int64, codec string, left int) (
	*Contents, error) {
	h := sha256.New()
	text = io.TeeReader(text, h)
	t := &tocReader{desc: desc, codec: codec, limit: end, left: left, l: &Contents{
		Files: make(map[string]*Part),
		List:  &List{dir: DiskDir, Entries: make(map[string]*Entry)}}}
	// Each entry is one piece.
	err := t.read(json.NewDecoder(&bounded.JSON{From: text, Depth: 2, Most: bounded.MaxPiece}))
	if err == nil {
		err = t.endFile(end)
	}
	// If the digest is wrong, report that, and no error in the text.
	_, rest := io.Copy(io.Discard, text)
	if got := transport.DigestIn(h); want != "" && got != want {
		return nil, &transport.DigestError{Want: want, Got: got}
	}
	if err = errors.Join(err, rest); err != nil {
		return nil, fmt.Errorf("its table of contents: %w", err)
	}
	return t.l, nil
}

func (t *tocReader) read(in *json.Decoder) error {
	seen := false
	return bounded.Fields(in, bounded.MaxPiece, func(key string) (bool, error) {
		if key != "entries" || seen {
			return false, nil
		}
		seen = true
		return true, bounded.Elements(in, func() error {
			e := new(tocEntry)
			if err := in.Decode(e); err != nil {
				return err
			}
			return t.add(e)
		})
	})
}

// add handles the next entry.
func (t *tocReader) add(e *tocEntry) error {
	if t.n++; t.n > maxEntries {
		return fmt.Errorf("it has more than %d entries", maxEntries)
	}
	name, err := cleanName(e.Name, DiskDir)
	if err != nil {
		return err
	}
	if e.Offset < 0 || e.Offset > t.limit || e.Offset != 0 && e.Offset < t.at {
		return fmt.Errorf("%.100q lies at %d, which is not behind what comes before it", name,
			e.Offset)
	}
	t.at = max(t.at, e.Offset)
	if e.Type == "chunk" {
		if t.file == nil {
			return nil
		}
		if name != t.file.Name {
			return fmt.Errorf("a chunk of %.100q comes behind %.100q", name, t.file.Name)
		}
		return t.chunk(e)
	}
	if err := t.endFile(e.Offset); err != nil {
		return err
	}
	return t.entry(e, name)
}

// entry handles an entry that is not a chunk.
func (t *tocReader) entry(e *tocEntry, name string) error {
	n := &Entry{Name: name, Size: e.Size, Ordinal: t.n}
	switch e.Type {
	case "reg":
		n.Kind = EntryFile
	case "hardlink":
		n.linkTo(e.LinkName)
	case "dir":
		n.Kind = EntryDirectory
	case "symlink":
		n.Kind, n.What = EntryRefused, "a symbolic link"
	default:
		n.Kind, n.What = EntryRefused, "not a regular file"
	}
	if e.Size < 0 || e.Size > 1<<60 {
		return fmt.Errorf("%.100q has a size of %d bytes", name, e.Size)
	}
	l := t.l.List
	if err := l.note(n); err != nil {
		return err
	}
	delete(t.l.Files, name)
	if n.Kind != EntryFile || !Under(DiskDir, name) ||
		strings.HasPrefix(path.Base(name), whiteoutPrefix) {
		return nil
	}
	if e.Size > image.DefaultMaxVirtualSize {
		return &Unsuited{fmt.Sprintf("has a file of %d bytes, more than any disk", e.Size)}
	}
	t.file = &Part{Name: name, Size: e.Size, Layer: t.desc.Digest.String(), Codec: t.codec}
	t.table, t.done, t.whole = nil, 0, e
	if e.Size == 0 {
		return nil
	}
	return t.chunk(e)
}

// chunk handles a chunk of the file.
func (t *tocReader) chunk(e *tocEntry) error {
	size := cmp.Or(e.ChunkSize, t.file.Size-e.ChunkOffset)
	if t.left--; t.left < 0 {
		return TooManyChunks()
	}
	switch {
	case e.ChunkOffset != t.done:
		return fmt.Errorf("a chunk of %.100q is said to begin at %d, and %d bytes come before it",
			t.file.Name, e.ChunkOffset, t.done)
	case size <= 0 || size > t.file.Size-t.done:
		return fmt.Errorf("a chunk of %.100q has %d bytes, and %d are left of the file",
			t.file.Name, size, t.file.Size-t.done)
	case e.ChunkType == chunkZeros:
		return t.zeros(e.Offset, size)
	case size > MaxUnit || e.InnerOffset > MaxUnit:
		return &Unsuited{fmt.Sprintf("has chunks of more than %d MiB", MaxUnit>>20)}
	case e.Offset <= 0 || e.InnerOffset < 0:
		return fmt.Errorf("a chunk of %.100q does not lie in the layer", t.file.Name)
	}
	sum := e.ChunkDigest
	if sum == "" && size == t.file.Size {
		sum = t.whole.Digest
	}
	digest, err := hex.DecodeString(strings.TrimPrefix(sum, "sha256:"))
	if err != nil || len(digest) != DigestSize || !strings.HasPrefix(sum, "sha256:") {
		return &Unsuited{"has a chunk without a SHA-256 digest in its table of contents"}
	}
	t.table = append(t.table, TableChunk{Off: e.Offset, Inner: e.InnerOffset, Size: size,
		Sum: [DigestSize]byte(digest)})
	t.done += size
	return nil
}

// zeros handles a chunk of zeros, which may be as long as the file.
func (t *tocReader) zeros(off, size int64) error {
	for t.done += size; size > 0; size -= maxHole {
		if t.left--; t.left < 0 {
			return TooManyChunks()
		}
		t.table = append(t.table, TableChunk{Off: off, Size: min(size, maxHole), Zeros: true})
	}
	return nil
}

func TooManyChunks() error {
	return &Unsuited{fmt.Sprintf("has more than %d chunks", MaxTOCChunks)}
}

// endFile ends the file of the last chunks. next is where the next data begins in the layer; 0:
// unknown.
func (t *tocReader) endFile(next int64) error {
	f := t.file
	if f == nil {
		return nil
	}
	if t.done != f.Size {
		return fmt.Errorf("%.100q has %d bytes, and its chunks have %d", f.Name, f.Size, t.done)
	}
	t.file = nil
	if end := t.whole.EndOffset; end > 0 && end <= t.limit {
		next = end
	}
	t.l.Files[f.Name] = f
	return f.setTable(t.table, next, t.limit)
}
