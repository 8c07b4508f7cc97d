package layer

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"

	"kubevirt.io/disk/internal/bitset"
	"kubevirt.io/disk/registry/transport"
)

// Chunks are the digests of a file's chunks. They tell which chunks are zeros, and check content.
type Chunks struct {
	// Name is a digest of the digests. Equal chunks make an equal file, in every layer.
	Name string

	size, chunk int64             // of the file, and of the range of one digest; bytes
	digests     io.ReaderAt       // one after the other
	whole, last [sha256.Size]byte // digests of a whole chunk of zeros, and of a last one
	zeros       bitset.Set        // the chunks that are zeros
}

// DigestsOf returns the digests of a file's chunks.
func (x *Index) DigestsOf(f *IndexFile) *io.SectionReader {
	return io.NewSectionReader(x.Digests, f.FirstChunk*DigestSize,
		f.Chunks(x.ChunkSize)*DigestSize)
}

// ChunksOf returns the chunks of a file of the index. It reads all their digests once.
func (x *Index) ChunksOf(f *IndexFile) (*Chunks, error) {
	size, chunk, digests := f.Size, x.ChunkSize, x.DigestsOf(f)
	c := &Chunks{size: size, chunk: chunk, digests: digests}
	zeros := make([]byte, min(size, chunk))
	c.whole = sha256.Sum256(zeros)
	c.last = c.whole
	if rest := size % chunk; rest > 0 {
		c.last = sha256.Sum256(zeros[:rest])
	}
	name := sha256.New()
	name.Write([]byte("kubevirt-disk chunks\n"))
	_ = binary.Write(name, binary.LittleEndian, []int64{size, chunk})
	in := bufio.NewReaderSize(io.TeeReader(io.NewSectionReader(digests, 0, digests.Size()), name),
		64<<10)
	count := (size + chunk - 1) / chunk
	for i := range count {
		var digest [sha256.Size]byte
		if _, err := io.ReadFull(in, digest[:]); err != nil {
			return nil, transport.UnexpectedEnd(err)
		}
		if digest == c.zerosOf(i) {
			c.zeros.Add(i)
		}
	}
	c.Name = transport.DigestIn(name)
	return c, nil
}

// zerosOf is the digest of zeros as long as the chunk.
func (c *Chunks) zerosOf(chunk int64) [sha256.Size]byte {
	if (chunk+1)*c.chunk > c.size {
		return c.last
	}
	return c.whole
}

// Run reports whether the bytes at off, which lie in the file, are in a chunk of zeros, and how
// many of length bytes are the same.
func (c *Chunks) Run(off, length int64) (n int64, zero bool) {
	end := min(off+length, c.size)
	first := off / c.chunk
	zero, chunks := c.zeros.Run(first, (end-1)/c.chunk+1)
	return min((first+chunks)*c.chunk, end) - off, zero
}

// Check compares whole chunks, of which the first begins at off, with their digests. For wrong
// content the error is a *transport.DigestError.
func (c *Chunks) Check(p []byte, off int64) error {
	for i := off / c.chunk; len(p) > 0; i++ {
		n := min(int64(len(p)), c.chunk)
		var want [DigestSize]byte
		if _, err := c.digests.ReadAt(want[:], i*DigestSize); err != nil {
			return fmt.Errorf("the digests of the chunks cannot be read: %w",
				transport.UnexpectedEnd(err))
		}
		if err := CheckSum(p[:n], want); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// CheckSum compares content with its digest. For wrong content the error is a
// *transport.DigestError.
func CheckSum(p []byte, want [DigestSize]byte) error {
	if got := sha256.Sum256(p); got != want {
		return &transport.DigestError{Want: fmt.Sprintf("sha256:%x", want),
			Got: fmt.Sprintf("sha256:%x", got)}
	}
	return nil
}
