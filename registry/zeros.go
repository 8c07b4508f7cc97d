package registry

import (
	"bytes"
	"crypto/sha256"
)

// zeroChunks finds the chunks of a file that are zeros by their digests.
type zeroChunks struct {
	size, chunk int64 // of the file, and of one digest; bytes
	digests     []byte
	whole, last [sha256.Size]byte // of as many zeros as a whole chunk has, and the last one
	any         bool
}

func newZeroChunks(size, chunk int64, digests []byte) zeroChunks {
	z := zeroChunks{size: size, chunk: chunk, digests: digests}
	zeros := make([]byte, min(size, chunk))
	z.whole = sha256.Sum256(zeros)
	z.last = z.whole
	if rest := size % chunk; rest > 0 {
		z.last = sha256.Sum256(zeros[:rest])
	}
	for i := int64(0); i < int64(len(digests)/digestSize) && !z.any; i++ {
		z.any = z.zero(i)
	}
	return z
}

func (z *zeroChunks) zero(chunk int64) bool {
	want := &z.whole
	if (chunk+1)*z.chunk > z.size {
		want = &z.last
	}
	return bytes.Equal(z.digests[chunk*digestSize:][:digestSize], want[:])
}

// run reports whether the bytes at off, which lie in the file, are in a chunk of zeros, and how
// many of length bytes are the same.
func (z *zeroChunks) run(off, length int64) (n int64, zero bool) {
	end := min(off+length, z.size)
	if !z.any {
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
