package layer

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/inflate"
)

// A layer that is compressed by gzip can only be read from its beginning. A process that has read
// and verified all of it knows more: where in the layer each part of the content begins, how to
// decompress from there on, and the digest of the part. A file keeps that:
//
//	magic, with the version of the format
//	for each chunk that has a checkpoint: its state, and the output before it
//	for each chunk of the content an entry of checkpointEntry bytes:
//	    0   SHA-256 of the chunk
//	    32  bits of the layer before the checkpoint (8 bytes)
//	    40  where its state begins in the file (8); the output before it follows
//	    48  bytes of that output, as they are stored (4)
//	    52  bytes of the state (2); 0: there is none, the layer begins here
//	    54  bytes by which the checkpoint lies behind the beginning of the chunk (2)
//	    56  1: the output is one zstd frame (4)
//	bytes of the content (8), bytes of the layer (8), bytes of a chunk (8)
//	XXH64 of all of that (8)
//
// All numbers are little-endian.
const (
	checkpointMagic = "KVDSEEK\x01"
	checkpointEntry = sha256.Size + 28
	checkpointFoot  = 4 * 8

	// seekChunk is how much content lies between two checkpoints, and seekLarge the same in a layer
	// of largeLayer bytes or more. Each read decompresses that much, and a checkpoint takes up to
	// 32 KiB. Bytes.
	seekChunk  = 1 << 20
	seekLarge  = 4 << 20
	largeLayer = 16 << 30
	// maxCheckpoints bounds them. A layer that would need more is read from the beginning each
	// time.
	maxCheckpoints = 1 << 18
	// maxSpan is how much of a layer may lie between two checkpoints, in bytes. Only content that
	// was made on purpose takes more room than that.
	maxSpan = 2 * seekLarge
	// maxTail is the most bytes in the file of the output before a checkpoint.
	maxTail = inflate.Window + 1<<10
)

// Recorder makes the checkpoints of a layer while it is read.
type Recorder struct {
	file  *os.File
	out   *bufio.Writer // to file, and sum
	sum   *xxhash.Digest
	at    int64 // bytes written
	chunk int64

	entries []byte // of all checkpoints, without the digests
	digests []byte
	hash    hash.Hash // of the current chunk
	Read    int64     // bytes of the content so far
	last    int64     // bits of the layer before the last checkpoint
	err     error     // why there will be no file
}

// ErrNoCheckpoints says that a layer cannot have checkpoints.
var ErrNoCheckpoints = errors.New("the layer is not suited for checkpoints")

// NewRecorder begins a file, which belongs to the caller.
func NewRecorder(file *os.File, layer int64) *Recorder {
	r := &Recorder{file: file, sum: xxhash.New(), hash: sha256.New(), chunk: seekChunk}
	if layer >= largeLayer {
		r.chunk = seekLarge
	}
	r.out = bufio.NewWriterSize(io.MultiWriter(file, r.sum), 256<<10)
	r.write([]byte(checkpointMagic))
	r.entries = make([]byte, checkpointEntry-sha256.Size) // the first chunk needs no checkpoint
	return r
}

func (r *Recorder) write(p []byte) {
	if r.err == nil {
		_, r.err = r.out.Write(p)
		r.at += int64(len(p))
	}
}

// follow reads a layer and takes notes. An error in the notes is no error of the layer.
func (r *Recorder) follow(z *inflate.Gzip) io.Reader {
	z.Mark(r.chunk, func(c inflate.Checkpoint) error {
		r.mark(c)
		return nil
	})
	return io.TeeReader(marking{z}, r)
}

// mark stores a checkpoint.
func (r *Recorder) mark(c inflate.Checkpoint) {
	n := int64(len(r.entries) / (checkpointEntry - sha256.Size))
	if c.In-r.last > maxSpan*8 || n >= maxCheckpoints {
		r.err = ErrNoCheckpoints
	}
	if r.last = c.In; r.err != nil {
		return
	}
	tail, packed := c.Tail, uint32(0)
	small, err := qcow2.AppendZstd(nil, tail)
	if err != nil {
		r.err = err
		return
	}
	if len(small) < len(tail) {
		tail, packed = small, 1
	}
	e := binary.LittleEndian.AppendUint64(r.entries, uint64(c.In))
	e = binary.LittleEndian.AppendUint64(e, uint64(r.at))
	e = binary.LittleEndian.AppendUint32(e, uint32(len(tail)))
	e = binary.LittleEndian.AppendUint16(e, uint16(len(c.State)))
	e = binary.LittleEndian.AppendUint16(e, uint16(c.Out-n*r.chunk))
	r.entries = binary.LittleEndian.AppendUint32(e, packed)
	r.write(c.State)
	r.write(tail)
}

// Write takes the content.
func (r *Recorder) Write(p []byte) (int, error) {
	if r.err != nil {
		return len(p), nil
	}
	for rest := p; len(rest) > 0; {
		n := min(int64(len(rest)), r.chunk-r.Read%r.chunk)
		r.hash.Write(rest[:n])
		rest = rest[n:]
		if r.Read += n; r.Read%r.chunk == 0 {
			r.endChunk()
		}
	}
	return len(p), nil
}

func (r *Recorder) endChunk() {
	r.digests = r.hash.Sum(r.digests)
	r.hash.Reset()
}

// Finish completes the file of a layer that was read to its end and verified. After an error there
// is no file.
func (r *Recorder) Finish(layer int64) error {
	if r.err != nil {
		return r.err
	}
	if r.Read%r.chunk != 0 {
		r.endChunk()
	}
	const rest = checkpointEntry - sha256.Size
	for i := range len(r.digests) / sha256.Size {
		r.write(r.digests[i*sha256.Size:][:sha256.Size])
		r.write(r.entries[i*rest:][:rest])
	}
	for _, n := range []int64{r.Read, layer, r.chunk} {
		r.write(binary.LittleEndian.AppendUint64(nil, uint64(n)))
	}
	if r.err == nil {
		r.err = r.out.Flush()
	}
	if r.err == nil {
		_, r.err = r.file.Write(binary.LittleEndian.AppendUint64(nil, r.sum.Sum64()))
	}
	return r.err
}

// Close ends the use of the file, whether or not it was completed.
func (r *Recorder) Close() {
	if r != nil {
		_ = r.file.Close() // if something is missing, opening the file finds out
	}
}

// Checkpoints are the checkpoints of a layer.
type Checkpoints struct {
	File  io.ReaderAt
	Table []byte
	Size  int64 // of the content, bytes
	Layer int64 // bytes
	Chunk int64 // bytes
	At    int64 // where the table begins in the file
}

var ErrCheckpoints = errors.New("is not a file of checkpoints, or is damaged")

// OpenCheckpoints reads a file of size bytes, for a layer of a given length. It checks everything
// except whether the file matches the layer.
func OpenCheckpoints(file io.ReaderAt, size, layer int64) (*Checkpoints, error) {
	if size < int64(len(checkpointMagic))+checkpointFoot {
		return nil, ErrCheckpoints
	}
	foot := make([]byte, checkpointFoot)
	if _, err := file.ReadAt(foot, size-checkpointFoot); err != nil {
		return nil, err
	}
	number := func(i int) int64 { return int64(binary.LittleEndian.Uint64(foot[8*i:])) }
	c := &Checkpoints{File: file, Size: number(0), Layer: number(1), Chunk: number(2)}
	if c.Chunk != seekChunk && c.Chunk != seekLarge || c.Layer != layer ||
		c.Size < 0 || c.Size > maxCheckpoints*c.Chunk {
		return nil, ErrCheckpoints
	}
	length := c.Count() * checkpointEntry
	if c.At = size - checkpointFoot - length; c.At < int64(len(checkpointMagic)) {
		return nil, ErrCheckpoints
	}
	sum := xxhash.New()
	whole := io.NewSectionReader(file, 0, size-8)
	magic := make([]byte, len(checkpointMagic))
	if _, err := io.ReadFull(io.TeeReader(whole, sum), magic); err != nil {
		return nil, err
	}
	if _, err := io.CopyBuffer(sum, struct{ io.Reader }{whole}, make([]byte, 1<<20)); err != nil {
		return nil, err
	}
	if string(magic) != checkpointMagic || sum.Sum64() != uint64(number(3)) {
		return nil, ErrCheckpoints
	}
	c.Table = make([]byte, length)
	if _, err := file.ReadAt(c.Table, c.At); err != nil {
		return nil, err
	}
	return c, c.Check()
}

// Count is the number of chunks.
func (c *Checkpoints) Count() int64 { return (c.Size + c.Chunk - 1) / c.Chunk }

// checkpointPlace is an entry of the table.
type checkpointPlace struct {
	Digest      []byte
	in          int64 // bits
	at          int64
	state, tail int64 // bytes
	over        int64
	packed      bool
}

func (c *Checkpoints) Entry(i int64) checkpointPlace {
	p := c.Table[i*checkpointEntry:][:checkpointEntry]
	u64 := func(at int) int64 { return int64(binary.LittleEndian.Uint64(p[at:])) }
	return checkpointPlace{Digest: p[:sha256.Size], in: u64(32), at: u64(40),
		tail:   int64(binary.LittleEndian.Uint32(p[48:])),
		state:  int64(binary.LittleEndian.Uint16(p[52:])),
		over:   int64(binary.LittleEndian.Uint16(p[54:])),
		packed: binary.LittleEndian.Uint32(p[56:]) == 1}
}

// Check bounds the values of the entries.
func (c *Checkpoints) Check() error {
	last := int64(0)
	for i := range c.Count() {
		e := c.Entry(i)
		if e.in < last || e.in > c.Layer*8 || e.in-last > maxSpan*8 || (e.state == 0) != (i == 0) ||
			e.state > inflate.MaxState || e.tail > maxTail || e.at < 0 ||
			i > 0 && e.at > c.At-e.state-e.tail {
			return ErrCheckpoints
		}
		last = e.in
	}
	return nil
}

// Span is where the layer has a chunk: offset and length, in bytes.
func (c *Checkpoints) Span(chunk int64) (off, length int64) {
	off, end := c.Entry(chunk).in/8, c.Layer
	if chunk+1 < c.Count() {
		end = (c.Entry(chunk+1).in + 7) / 8
	}
	return off, end - off
}

// Read fills p with the beginning of a chunk. in is the chunk's span of the layer.
func (c *Checkpoints) Read(in io.Reader, chunk int64, p []byte) error {
	e := c.Entry(chunk)
	z := inflate.NewGzip(in)
	if e.state > 0 {
		kept := make([]byte, e.state+e.tail)
		if _, err := c.File.ReadAt(kept, e.at); err != nil {
			return err
		}
		tail := kept[e.state:]
		if e.packed {
			var err error
			tail, err = unpacker().DecodeAll(tail, make([]byte, 0, inflate.Window))
			if err != nil {
				return fmt.Errorf("%w: %w", ErrCheckpoints, err)
			}
		}
		var err error
		z, err = inflate.ResumeGzip(in, inflate.Checkpoint{In: e.in, Out: chunk*c.Chunk + e.over,
			State: kept[:e.state], Tail: tail}, chunk*c.Chunk)
		if err != nil {
			return err
		}
	}
	_, err := io.ReadFull(z, p)
	return err
}
