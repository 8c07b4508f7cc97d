package registry

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sort"

	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// minUnit is the least that is fetched and kept at once: as many whole chunks as fit. Bytes.
const minUnit = 256 << 10

// packed is a file that is compressed in chunks. Its chunks are fetched and kept in units. A unit
// has whole chunks, so the chunks' digests verify cached data.
type packed struct {
	layer *transport.Blob
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
func newPacked(c *cache.Cache, from *transport.Blob, p *layer.Part) (f *packed, name string,
	err error) {
	f = &packed{layer: from, table: p.Table, codec: p.Codec, unit: minUnit, size: p.Size}
	count := len(p.Table) / layer.TableEntry
	for i := range count {
		for chunk := layer.ChunkAt(p.Table, i); f.unit < chunk.Size && !chunk.Zeros; {
			f.unit *= 2
		}
	}
	h := sha256.New()
	fmt.Fprintf(h, "kubevirt-disk table\n%d\n", f.unit)
	var at, begin, filled int64 // begin of the data to fetch for the unit; 0: none yet
	for i := range count {
		chunk := layer.ChunkAt(p.Table, i)
		if chunk.Size <= 0 || chunk.Off < 0 || chunk.Size > layer.MaxUnit && !chunk.Zeros {
			return nil, "", errTable
		}
		apart := !chunk.Zeros && begin > 0 &&
			(chunk.Off < begin || chunk.Off+chunk.Length-begin > 2*f.unit)
		if i == 0 || filled+chunk.Size > f.unit || apart {
			f.units = append(f.units, packedUnit{at, i, chunk.Zeros && chunk.Size > f.unit})
			begin, filled = 0, 0
		}
		if begin == 0 && !chunk.Zeros {
			begin = chunk.Off
		}
		filled += chunk.Size
		at += chunk.Size
		_ = binary.Write(h, binary.LittleEndian, chunk.Size)
		h.Write(chunk.Sum[:])
	}
	if len(p.Table)%layer.TableEntry != 0 || at != p.Size || f.unit > layer.MaxUnit {
		return nil, "", errTable
	}
	name = fmt.Sprintf("sha256:%x", h.Sum(nil))
	// The name includes the layer and the table, because both decide how chunks are cut and that
	// nothing lies between them.
	h.Write([]byte(from.Desc.Digest.String()))
	h.Write(p.Table)
	kept := fmt.Sprintf("sha256:%x", h.Sum(nil))
	f.blob, err = c.Blob(cache.BlobOptions{Digest: kept, From: from.Host(),
		Size: int64(len(f.units)) * f.unit, ChunkSize: f.unit, Fetch: f.fetch, Verify: f.verify})
	return f, name, err
}

var errTable = errors.New("has a table of chunks that contradicts itself")

// chunksOf calls visit for each chunk of a unit, with its bytes of p.
func (f *packed) chunksOf(unit int64, p []byte,
	visit func(c layer.TableChunk, p []byte) error) error {
	end := len(f.table) / layer.TableEntry
	if int(unit)+1 < len(f.units) {
		end = f.units[unit+1].first
	}
	for i := f.units[unit].first; i < end; i++ {
		c := layer.ChunkAt(f.table, i)
		if err := visit(c, p[:c.Size]); err != nil {
			return err
		}
		p = p[c.Size:]
	}
	return nil
}

// fetch fetches a unit. If content cannot be decompressed, it leaves the buffer as it is: verify
// finds that wrong.
func (f *packed) fetch(ctx context.Context, p []byte, off int64) error {
	unit := off / f.unit
	if f.units[unit].hole {
		return nil // it is never read
	}
	var begin, end int64
	_ = f.chunksOf(unit, p, func(c layer.TableChunk, p []byte) error {
		if c.Zeros {
			clear(p)
			return nil
		}
		if end == 0 {
			begin = c.Off
		}
		end = max(end, c.Off+c.Length)
		return nil
	})
	raw := make([]byte, end-begin)
	var more error
	unpackAll := func() error {
		more = nil
		_ = f.chunksOf(unit, p, func(c layer.TableChunk, p []byte) error {
			if c.Zeros {
				return nil
			}
			err := c.Unpack(f.codec, raw[c.Off-begin:][:c.Length], p)
			if errors.Is(err, layer.ErrMore) {
				more = fmt.Errorf("%w: %w", err, &transport.DigestError{
					Want: fmt.Sprintf("sha256:%x", c.Sum), Got: "none, as there is more of it"})
			}
			return nil
		})
		return errors.Join(f.verify(unit, p), more)
	}
	if err := f.layer.FillChecked(ctx, raw, begin, unpackAll); err != nil {
		return err
	}
	if unpackAll(); f.verify(unit, p) != nil {
		return nil
	}
	return more // although each chunk is right
}

// verify checks each chunk of a unit against its digest.
func (f *packed) verify(unit int64, p []byte) error {
	if f.units[unit].hole {
		return nil
	}
	return f.chunksOf(unit, p, func(c layer.TableChunk, p []byte) error {
		if c.Zeros {
			c.Sum = sha256.Sum256(make([]byte, len(p)))
		}
		return layer.CheckSum(p, c.Sum)
	})
}

// unitOf is the unit of a byte of the file. There must be one.
func (f *packed) unitOf(off int64) int {
	return sort.Search(len(f.units), func(i int) bool { return f.units[i].start > off }) - 1
}

func (f *packed) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if int64(len(p)) > f.unit {
		f.Prefetch(off, int64(len(p)))
	}
	for n < len(p) {
		at := off + int64(n)
		i := f.unitOf(at)
		part := p[n:min(int64(len(p)), int64(n)+f.endOf(i)-at)]
		got, err := f.blob.ReadAt(ctx, part, int64(i)*f.unit+at-f.units[i].start)
		if n += got; got < len(part) {
			return n, err
		}
	}
	return n, nil
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

func (f *packed) endOf(unit int) int64 {
	if unit+1 < len(f.units) {
		return f.units[unit+1].start
	}
	return f.size
}

func (f *packed) run(off, length int64) (n int64, zero bool) {
	i, end := f.unitOf(off), min(off+length, f.size)
	zero = f.units[i].hole
	at := f.endOf(i)
	for i++; at < end && f.units[i].hole == zero; i++ {
		at = f.endOf(i)
	}
	return min(at, end) - off, zero
}

// Has is false: finding out is not worthwhile.
func (f *packed) Has(off, length int64) bool { return false }

func (f *packed) Size() int64 { return f.size }
