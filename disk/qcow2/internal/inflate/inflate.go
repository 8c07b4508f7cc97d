// Package inflate decodes raw deflate data (RFC 1951) in one call: the whole input and the whole
// output are memory that the caller has at hand, so there is no window to keep and no state between
// calls. That is what a compressed cluster of a disk image is, and it is decoded more than twice as
// fast as by a streaming decoder.
//
// What compress/flate refuses is refused here, and what it accepts is accepted, byte for byte; a
// fuzz test holds the two together.
package inflate

import (
	"encoding/binary"
	"errors"
)

// What is wrong with the input.
var (
	ErrTruncated = errors.New("the deflate data ends too early")
	ErrBlockType = errors.New("a deflate block has the reserved type 3")
	ErrStored    = errors.New("the length of a stored deflate block contradicts its complement")
	ErrLengths   = errors.New("the code lengths of a deflate block are not valid")
	ErrTree      = errors.New("the Huffman codes of a deflate block are over-subscribed or " +
		"incomplete")
	ErrCode     = errors.New("the deflate data has a code that stands for nothing")
	ErrDistance = errors.New("a deflate match begins before the output")
)

// Decoder has the tables of the block that is being decoded. The zero value is ready to use; it can
// be used again and again, by one goroutine at a time, and then allocates nothing. About 25 KiB.
type Decoder struct {
	// the next bits of the input, the first one lowest; above those of left may be some that follow
	bits uint64
	left uint // how many of them were taken from the input and are not used yet
	pos  int  // in the input: what comes after those
	out  int  // bytes written to the output

	tables  *tables // of the block: own, or those of fixed codes
	own     tables
	codes   [1 << codeBits]uint32 // of the code lengths' code
	lengths [maxLitLen + maxDist]uint8
	sorted  [numLitLen]uint16
}

// Decode fills dst from the deflate stream that src begins with, and ignores what follows in src.
// It stops when dst is full, even where the stream would go on, and returns how many bytes it
// wrote: fewer than len(dst), without an error, where the stream ends before. What dst has beyond
// them may be overwritten too.
//
// An error is one of this package's, and the bytes counted by n are right nevertheless.
func (d *Decoder) Decode(dst, src []byte) (n int, err error) {
	d.bits, d.left, d.pos, d.out = 0, 0, 0, 0
	for last := false; !last && d.out < len(dst); {
		if !d.need(src, 3) {
			return d.out, ErrTruncated
		}
		header := d.take(3)
		last = header&1 != 0
		switch header >> 1 {
		case 0:
			err = d.stored(dst, src)
		case 1:
			d.tables = fixedTables()
			err = d.block(dst, src)
		case 2:
			if err = d.readTables(src); err == nil {
				err = d.block(dst, src)
			}
		default:
			err = ErrBlockType
		}
		if err != nil {
			return d.out, err
		}
	}
	return d.out, nil
}

// need makes sure that at least n bits are at hand, at most 56; it is false where the input has no
// more.
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

// take removes n bits that are at hand.
func (d *Decoder) take(n uint) uint {
	v := d.bits & (1<<(n&63) - 1)
	d.bits >>= n & 63
	d.left -= n
	return uint(v)
}

// stored copies a block that is not compressed (RFC 1951, section 3.2.4).
func (d *Decoder) stored(dst, src []byte) error {
	d.pos -= int(d.left / 8) // back to the first byte that is not begun
	d.bits, d.left = 0, 0
	if len(src)-d.pos < 4 {
		return ErrTruncated
	}
	n, complement := binary.LittleEndian.Uint16(src[d.pos:]),
		binary.LittleEndian.Uint16(src[d.pos+2:])
	d.pos += 4
	if n != ^complement {
		return ErrStored
	}
	want := min(int(n), len(dst)-d.out)
	copied := copy(dst[d.out:d.out+want], src[d.pos:])
	d.out += copied
	d.pos += copied
	if copied < want {
		return ErrTruncated
	}
	return nil
}

// block decodes a compressed block with the tables that are set, to its end or until dst is full.
func (d *Decoder) block(dst, src []byte) error {
	ended, err := d.fast(dst, src)
	for !ended && err == nil && d.out < len(dst) {
		ended, err = d.step(dst, src)
	}
	return err
}
