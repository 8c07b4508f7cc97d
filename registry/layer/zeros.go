package layer

import (
	"bufio"
	"crypto/sha256"
	"io"

	"kubevirt.io/disk/registry/transport"
)

// Zeros finds the chunks of a file that are zeros by their digests.
type Zeros struct {
	size, chunk int64             // of the file, and of one digest; bytes
	whole, last [sha256.Size]byte // of as many zeros as a whole chunk has, and the last one
	zeros       []uint64          // has a bit for each chunk; nil: none is known to be zeros
}

// NewZeros reads the digests of the chunks, one after the other. nil: there are none.
func NewZeros(size, chunk int64, digests io.Reader) (z Zeros, err error) {
	z = Zeros{size: size, chunk: chunk}
	zeros := make([]byte, min(size, chunk))
	z.whole = sha256.Sum256(zeros)
	z.last = z.whole
	if rest := size % chunk; rest > 0 {
		z.last = sha256.Sum256(zeros[:rest])
	}
	if digests == nil {
		return z, nil
	}
	in, count := bufio.NewReaderSize(digests, 64<<10), (size+chunk-1)/chunk
	for i := range count {
		var digest [sha256.Size]byte
		if _, err := io.ReadFull(in, digest[:]); err != nil {
			return z, transport.UnexpectedEnd(err)
		}
		if digest == z.Of(i) {
			if z.zeros == nil {
				z.zeros = make([]uint64, (count+63)/64)
			}
			z.zeros[i/64] |= 1 << (i % 64)
		}
	}
	return z, nil
}

// Of is the digest that a chunk of zeros has.
func (z *Zeros) Of(chunk int64) [sha256.Size]byte {
	if (chunk+1)*z.chunk > z.size {
		return z.last
	}
	return z.whole
}

func (z *Zeros) zero(chunk int64) bool { return z.zeros[chunk/64]&(1<<(chunk%64)) != 0 }

// Run reports whether the bytes at off, which lie in the file, are in a chunk of zeros, and how
// many of length bytes are the same.
func (z *Zeros) Run(off, length int64) (n int64, zero bool) {
	end := min(off+length, z.size)
	if z.zeros == nil {
		return end - off, false
	}
	chunk := off / z.chunk
	zero = z.zero(chunk)
	at := off
	for at < end && z.zero(chunk) == zero {
		chunk++
		at = chunk * z.chunk
	}
	return min(at, end) - off, zero
}
