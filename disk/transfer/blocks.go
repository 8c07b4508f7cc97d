package transfer

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"os"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/osfile"
)

// blockSize is the granularity in bytes at which zeros stay holes.
const blockSize = 64 << 10

// blocks calls do for each block of a file that is not all zeros, in order. A block is aligned, and
// only the last one of a file may be short.
func blocks(f *os.File, size int64, do func(off int64, block []byte) error) error {
	buf := make([]byte, blockSize)
	for off := int64(0); off < size; {
		// Of what a file system can tell, only holes of whole blocks matter.
		n, data, err := osfile.SeekExtent(f, off, size-off)
		switch {
		case err != nil:
			return err
		case !data && n >= blockSize:
			off += n &^ (blockSize - 1)
			continue
		case !data && off+n == size:
			return nil
		case !data:
			n = blockSize
		}
		for end := off + n; off < end && off < size; off += blockSize {
			block := buf[:min(blockSize, size-off)]
			if err := osfile.ReadFull(f, block, off); err != nil {
				return err
			}
			if rawfile.AllZero(block) {
				continue
			}
			if err := do(off, block); err != nil {
				return err
			}
		}
	}
	return nil
}

// sum is the digest of a file's content: of its size, and of its blocks with their places. Holes
// and zeros are the same.
type sum struct{ hash.Hash }

func newSum(size int64) sum {
	s := sum{sha256.New()}
	s.number(size)
	return s
}

func (s sum) add(off int64, block []byte) {
	s.number(off)
	_, _ = s.Write(block) // it never fails
}

func (s sum) number(n int64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	_, _ = s.Write(b[:])
}
