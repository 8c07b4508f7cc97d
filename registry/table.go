package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"kubevirt.io/disk/registry/cache"
)

const (
	codecGzip = "gzip"
	codecZstd = "zstd"

	// minUnit and maxUnit limit how much of such a file is fetched and kept at once: as many whole
	// chunks as fit. No chunk is larger than maxUnit. Bytes.
	minUnit = 256 << 10
	maxUnit = cache.MaxChunkSize
)

// tableChunk is a chunk of a file that is compressed in chunks.
type tableChunk struct {
	off    int64 // in the layer, of the compressed data
	length int64 // bytes of that
	inner  int64 // decompressed bytes before the chunk
	size   int64 // bytes
	sum    [digestSize]byte
	zeros  bool // it has nothing but zeros; length and sum are 0, and it may be larger than a unit
}

// tableEntry is the size of a chunk in part.Table: off, and 4 bytes each for the other numbers,
// little-endian, then its SHA-256.
const tableEntry = 8 + 3*4 + digestSize

// setTable stores the chunks of the file. next is where the data after them begins in the layer; 0:
// unknown. end is the last possible end of the last chunk of the layer.
func (p *part) setTable(table []tableChunk, next, end int64) error {
	var at int64
	for i := len(table) - 1; i >= 0; i-- {
		c := &table[i]
		if i < len(table)-1 && table[i+1].off > c.off {
			next = table[i+1].off
		}
		if c.zeros {
			continue
		}
		// More than that is never needed, whatever lies between two chunks.
		most := c.inner + c.size + (c.inner+c.size)/64 + 64<<10
		if c.length = min(end-c.off, most); next > c.off {
			c.length = min(c.length, next-c.off)
		}
		if c.length <= 0 {
			return fmt.Errorf("a chunk of %.100q has no bytes in the layer", p.Name)
		}
	}
	for _, c := range table {
		at += c.size
		p.Table = binary.LittleEndian.AppendUint64(p.Table, uint64(c.off))
		for _, n := range []int64{c.length, c.inner, c.size} {
			p.Table = binary.LittleEndian.AppendUint32(p.Table, uint32(n))
		}
		p.Table = append(p.Table, c.sum[:]...)
	}
	if at != p.Size {
		return fmt.Errorf("%.100q has %d bytes, and its chunks have %d", p.Name, p.Size, at)
	}
	return nil
}

func chunkAt(table []byte, i int) tableChunk {
	p := table[i*tableEntry:]
	number := func(at int) int64 { return int64(binary.LittleEndian.Uint32(p[at:])) }
	return tableChunk{off: int64(binary.LittleEndian.Uint64(p)), length: number(8),
		inner: number(12), size: number(16), sum: [digestSize]byte(p[20:tableEntry]),
		zeros: number(8) == 0}
}

// packed is a file that is compressed in chunks. Its chunks are fetched and kept in units. A unit
// has whole chunks, so the chunks' digests verify the cached data.
type packed struct {
	layer *blob
	table []byte
	codec string
	unit  int64
	size  int64 // of the file
	units []packedUnit
	blob  *cache.Blob
}

type packedUnit struct {
	start int64 // in the file
	first int   // chunk
	hole  bool  // it is one chunk of zeros, which may be larger than others
}

// newPacked opens such a file. name names its content.
func newPacked(c *cache.Cache, layer *blob, p *part) (f *packed, name string, err error) {
	f = &packed{layer: layer, table: p.Table, codec: p.Codec, unit: minUnit, size: p.Size}
	count := len(p.Table) / tableEntry
	for i := range count {
		for chunk := chunkAt(p.Table, i); f.unit < chunk.size && !chunk.zeros; {
			f.unit *= 2
		}
	}
	h := sha256.New()
	fmt.Fprintf(h, "kubevirt-disk table\n%d\n", f.unit)
	var at, begin, filled int64 // begin of the data to fetch for the unit; 0: none yet
	for i := range count {
		chunk := chunkAt(p.Table, i)
		if chunk.size <= 0 || chunk.off < 0 || chunk.size > maxUnit && !chunk.zeros {
			return nil, "", errTable
		}
		apart := !chunk.zeros && begin > 0 &&
			(chunk.off < begin || chunk.off+chunk.length-begin > 2*f.unit)
		if i == 0 || filled+chunk.size > f.unit || apart {
			f.units = append(f.units, packedUnit{at, i, chunk.zeros && chunk.size > f.unit})
			begin, filled = 0, 0
		}
		if begin == 0 && !chunk.zeros {
			begin = chunk.off
		}
		filled += chunk.size
		at += chunk.size
		_ = binary.Write(h, binary.LittleEndian, chunk.size)
		h.Write(chunk.sum[:])
	}
	if len(p.Table)%tableEntry != 0 || at != p.Size || f.unit > maxUnit {
		return nil, "", errTable
	}
	name = fmt.Sprintf("sha256:%x", h.Sum(nil))
	f.blob, err = c.Blob(cache.BlobOptions{Digest: name, Size: int64(len(f.units)) * f.unit,
		ChunkSize: f.unit, Fetch: f.fetch, Verify: f.verify})
	return f, name, err
}

var errTable = errors.New("has a table of chunks that contradicts itself")

// chunksOf calls visit for each chunk of a unit, with its bytes of p.
func (f *packed) chunksOf(unit int64, p []byte, visit func(c tableChunk, p []byte) error) error {
	end := len(f.table) / tableEntry
	if int(unit)+1 < len(f.units) {
		end = f.units[unit+1].first
	}
	for i := f.units[unit].first; i < end; i++ {
		c := chunkAt(f.table, i)
		if err := visit(c, p[:c.size]); err != nil {
			return err
		}
		p = p[c.size:]
	}
	return nil
}

// fetch brings a unit. It leaves content that cannot be decompressed as it is, because verify will
// find it wrong.
func (f *packed) fetch(ctx context.Context, p []byte, off int64) error {
	unit := off / f.unit
	if f.units[unit].hole {
		return nil // nobody reads it
	}
	var begin, end int64
	_ = f.chunksOf(unit, p, func(c tableChunk, p []byte) error {
		if c.zeros {
			clear(p)
			return nil
		}
		if end == 0 {
			begin = c.off
		}
		end = max(end, c.off+c.length)
		return nil
	})
	raw := make([]byte, end-begin)
	unpackAll := func() error {
		_ = f.chunksOf(unit, p, func(c tableChunk, p []byte) error {
			if !c.zeros {
				_ = unpack(f.codec, raw[c.off-begin:][:c.length], c.inner, p)
			}
			return nil
		})
		return f.verify(unit, p)
	}
	if n, err := f.layer.checked(ctx, raw, begin, unpackAll); n < len(raw) {
		return unexpectedEnd(err)
	}
	_ = unpackAll()
	return nil
}

// verify checks each chunk of a unit against its digest.
func (f *packed) verify(unit int64, p []byte) error {
	if f.units[unit].hole {
		return nil
	}
	return f.chunksOf(unit, p, func(c tableChunk, p []byte) error {
		if c.zeros {
			c.sum = sha256.Sum256(make([]byte, len(p)))
		}
		if got := sha256.Sum256(p); got != c.sum {
			return &DigestError{Want: fmt.Sprintf("sha256:%x", c.sum),
				Got: fmt.Sprintf("sha256:%x", got)}
		}
		return nil
	})
}

// prove is for proof.
func (f *packed) prove(ctx context.Context, off int64) error {
	unit := int64(f.unitOf(off))
	again, p := *f, make([]byte, f.unit)
	again.layer = f.layer.proven()
	if err := again.fetch(ctx, p, unit*f.unit); err != nil {
		return err
	}
	if err := f.verify(unit, p); err != nil {
		return contradicts(f.layer, err)
	}
	return nil
}

// unpacker decompresses chunks into a buffer that it never enlarges. So a chunk's size bounds the
// memory, whatever window a frame claims. podman's are up to 32 MiB.
var unpacker = sync.OnceValue(func() *zstd.Decoder {
	z, _ := zstd.NewReader(nil, zstd.WithDecoderMaxWindow(maxZstdWindow),
		zstd.WithDecodeAllCapLimit(true)) // fails only with other options
	return z
})

// unpack fills p with the decompressed bytes of raw behind the first inner bytes.
func unpack(codec string, raw []byte, inner int64, p []byte) error {
	if codec == codecZstd {
		// A part of the next chunk may follow.
		all, err := unpacker().DecodeAll(raw, make([]byte, 0, inner+int64(len(p))))
		if int64(len(all)) < inner+int64(len(p)) {
			return errors.Join(io.ErrUnexpectedEOF, err)
		}
		copy(p, all[inner:])
		return nil
	}
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, z, inner); err != nil {
		return err
	}
	_, err = io.ReadFull(z, p)
	return err
}

// unitOf is the unit of a byte of the file. There must be one.
func (f *packed) unitOf(off int64) int {
	return sort.Search(len(f.units), func(i int) bool { return f.units[i].start > off }) - 1
}

func (f *packed) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off+int64(len(p)) > f.size {
		p, err = p[:max(0, f.size-off)], io.EOF
	}
	if int64(len(p)) > f.unit {
		f.Prefetch(off, int64(len(p)))
	}
	for n < len(p) {
		at := off + int64(n)
		i := f.unitOf(at)
		part := p[n:min(int64(len(p)), int64(n)+f.endOf(i)-at)]
		if f.units[i].hole {
			clear(part)
			n += len(part)
			continue
		}
		got, err := f.blob.ReadAt(ctx, part, int64(i)*f.unit+at-f.units[i].start)
		n += got
		if err != nil && got < len(part) {
			return n, err
		}
	}
	return n, err
}

func (f *packed) Prefetch(off, length int64) {
	if off >= f.size || length <= 0 {
		return
	}
	last := f.unitOf(min(off+length, f.size) - 1)
	for i := f.unitOf(off); i <= last; i++ {
		if !f.units[i].hole {
			f.blob.Prefetch(int64(i)*f.unit, f.unit)
		}
	}
}

// endOf is the end of the unit in the file.
func (f *packed) endOf(unit int) int64 {
	if unit+1 < len(f.units) {
		return f.units[unit+1].start
	}
	return f.size
}

// hole returns how far the run at off goes, and whether it is a long run of zeros.
func (f *packed) hole(off int64) (length int64, hole bool) {
	i := f.unitOf(off)
	return f.endOf(i) - off, f.units[i].hole
}

func (f *packed) Size() int64 { return f.size }
