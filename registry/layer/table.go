package layer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	codecGzip = "gzip"
	codecZstd = "zstd"

	// MaxUnit is the size of the largest chunk, and of the largest piece of a cache. Bytes.
	MaxUnit = 4 << 20
)

// TableChunk is a chunk of a file that is compressed in chunks.
type TableChunk struct {
	Off    int64 // in the layer, of the compressed data
	Length int64 // bytes of that
	Inner  int64 // decompressed bytes before the chunk in that data
	Size   int64 // bytes
	Sum    [DigestSize]byte
	Zeros  bool // only zeros; then Length and Sum are 0, and the chunk may be larger than a unit
	// Alone says that the compressed data has nothing else: it ends where the next chunk of the
	// file begins.
	Alone bool
}

// TableEntry is the size of a chunk in part.Table: off, and 4 bytes each for the other numbers,
// little-endian, then its SHA-256.
const TableEntry = 8 + 3*4 + DigestSize

// setTable stores the chunks of the file. next is where the data after them begins in the layer; 0:
// unknown. end is the last possible end of the last chunk of the layer.
func (p *Part) setTable(table []TableChunk, next, end int64) error {
	var at int64
	for i := len(table) - 1; i >= 0; i-- {
		c := &table[i]
		if i < len(table)-1 && table[i+1].Off > c.Off {
			next = table[i+1].Off
		}
		if i < len(table)-1 && !c.follows(&table[i+1]) {
			return &Unsuited{"has chunks that do not follow each other"}
		}
		if c.Zeros {
			continue
		}
		// The data never needs more than that, whatever lies between two chunks.
		most := c.Inner + c.Size + (c.Inner+c.Size)/64 + 64<<10
		if c.Length = min(end-c.Off, most); next > c.Off {
			c.Length = min(c.Length, next-c.Off)
		}
		if c.Length <= 0 {
			return fmt.Errorf("a chunk of %.100q has no bytes in the layer", p.Name)
		}
		if i < len(table)-1 && table[i+1].Off > c.Off && c.Length < next-c.Off {
			return &Unsuited{"has chunks with other data between them"}
		}
	}
	for _, c := range table {
		at += c.Size
		p.Table = binary.LittleEndian.AppendUint64(p.Table, uint64(c.Off))
		for _, n := range []int64{c.Length, c.Inner, c.Size} {
			p.Table = binary.LittleEndian.AppendUint32(p.Table, uint32(n))
		}
		p.Table = append(p.Table, c.Sum[:]...)
	}
	if at != p.Size {
		return fmt.Errorf("%.100q has %d bytes, and its chunks have %d", p.Name, p.Size, at)
	}
	return nil
}

// follows reports whether next may be the chunk behind c: at the next place of the archive, or at
// the beginning of other compressed data.
func (c *TableChunk) follows(next *TableChunk) bool {
	if next.Off > c.Off {
		return next.Inner == 0
	}
	return c.Zeros && next.Zeros || next.Inner == c.Inner+c.Size
}

func ChunkAt(table []byte, i int) TableChunk {
	p := table[i*TableEntry:]
	number := func(at int) int64 { return int64(binary.LittleEndian.Uint32(p[at:])) }
	c := TableChunk{Off: int64(binary.LittleEndian.Uint64(p)), Length: number(8), Inner: number(12),
		Size: number(16), Sum: [DigestSize]byte(p[20:TableEntry]), Zeros: number(8) == 0}
	c.Alone = len(p) >= 2*TableEntry && int64(binary.LittleEndian.Uint64(p[TableEntry:])) > c.Off
	return c
}

// unpacker decompresses chunks into a buffer that it never enlarges. So a chunk's size bounds the
// memory, whatever window a frame claims. podman's are up to 32 MiB.
var unpacker = sync.OnceValue(func() *zstd.Decoder {
	z, _ := zstd.NewReader(nil, zstd.WithDecoderMaxWindow(maxZstdWindow),
		zstd.WithDecodeAllCapLimit(true)) // fails only with other options
	return z
})

// ErrMore says that compressed data has more than the only chunk in it. A program that reads the
// archive would see that data in the file.
var ErrMore = errors.New("a chunk has more data than its table of contents says")

// Unpack fills p with the decompressed bytes of raw, the data of the chunk.
func (c *TableChunk) Unpack(codec string, raw []byte, p []byte) error {
	inner := c.Inner
	if codec == codecZstd {
		// A part of the next chunk may follow.
		all, err := unpacker().DecodeAll(raw, make([]byte, 0, inner+int64(len(p))))
		if int64(len(all)) < inner+int64(len(p)) {
			return errors.Join(io.ErrUnexpectedEOF, err)
		}
		copy(p, all[inner:])
		if c.Alone && err != nil {
			return ErrMore
		}
		return nil
	}
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, z, inner); err != nil {
		return err
	}
	if _, err = io.ReadFull(z, p); err != nil || !c.Alone {
		return err
	}
	if n, err := z.Read(make([]byte, 1)); n > 0 || err != io.EOF {
		return ErrMore
	}
	return nil
}
