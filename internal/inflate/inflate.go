// Package inflate decodes raw deflate data (RFC 1951).
//
// A Decoder decodes in one call. The caller has the whole input and output in memory, as for a
// compressed cluster of a disk image. So there is no window to keep. This is more than twice as
// fast as a streaming decoder.
//
// A Gzip reads gzip members (RFC 1952) from a reader. It uses the same decoder in pieces.
//
// Both accept and refuse exactly the same data as the standard library. Fuzz tests compare them.
package inflate

import (
	"encoding/binary"
	"errors"
	"io"
)

// The errors of an input.
var (
	errTruncated = errors.New("the deflate data ends too early")
	errBlockType = errors.New("a deflate block has the reserved type 3")
	errStored    = errors.New("the length of a stored deflate block contradicts its complement")
	errLengths   = errors.New("the code lengths of a deflate block are not valid")
	errTree      = errors.New("the Huffman codes of a deflate block are over-subscribed or " +
		"incomplete")
	errCode     = errors.New("the deflate data has a code without a meaning")
	errDistance = errors.New("a deflate match begins before the output")
)

// Decoder holds the tables of the block that is being decoded. The zero value is ready to use. One
// goroutine at a time may use it, again and again, and Decode then allocates nothing. It takes
// about 25 KiB.
type Decoder struct {
	// the next bits of the input, the first one lowest; above the lowest left bits there may be
	// some of the following ones
	bits uint64
	left uint // how many of them are valid and unused
	pos  int  // the next byte of the input
	out  int  // bytes written to the output

	tables  *tables // of the block: own, or those of fixed codes
	own     tables
	codes   [1 << codeBits]uint32 // of the code lengths' code
	lengths [maxLitLen + maxDist]uint8
	sorted  [numLitLen]uint16

	mode   mode
	final  bool // the block is the last one
	stored int  // bytes left of a stored block

	src io.Reader // of a Gzip
	buf []byte    // of in, for a Gzip
	in  []byte    // in[pos:] is unused
	err error     // of src; not nil: there is no input after in
	dst []byte    // dst[:out] is output
}

// Decode fills dst from the deflate stream at the beginning of src, and ignores the rest of src. It
// stops when dst is full, even if the stream goes on, and returns how many bytes it wrote. If the
// stream ends earlier, n is less than len(dst), and this is no error. Decode may also overwrite the
// bytes of dst after n.
//
// An error is one of this package's. Even then, the n bytes are right.
func (d *Decoder) Decode(dst, src []byte) (n int, err error) {
	d.in, d.err, d.dst = src, io.EOF, dst
	d.bits, d.left, d.pos = 0, 0, 0
	d.restart()
	err = d.advance(len(dst))
	d.in, d.dst = nil, nil
	return d.out, err
}

// need makes at least n bits available, at most 56. It returns false if the input has too few.
func (d *Decoder) need(src []byte, n uint) bool {
	if d.left >= n {
		return true
	}
	if rest := src[d.pos:]; len(rest) >= 8 {
		d.bits |= binary.LittleEndian.Uint64(rest) << (d.left & 63)
		d.pos += int((63 - d.left) >> 3)
		d.left |= 56
		return true
	}
	for d.left < n && d.pos < len(src) {
		d.bits |= uint64(src[d.pos]) << (d.left & 63)
		d.pos++
		d.left += 8
	}
	return d.left >= n
}

// take removes n available bits.
func (d *Decoder) take(n uint) uint {
	v := d.bits & (1<<(n&63) - 1)
	d.bits >>= n & 63
	d.left -= n
	return uint(v)
}
