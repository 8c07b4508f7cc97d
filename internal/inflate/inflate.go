// Package inflate decodes raw deflate data (RFC 1951).
//
// A Decoder decodes in one call. The caller has the whole input and output in memory, as for a
// compressed cluster of a disk image. So there is no window to keep and no state between calls.
// This is more than twice as fast as a streaming decoder.
//
// A Gzip reads gzip members (RFC 1952) from a reader.
//
// Both accept and refuse exactly what the standard library does, byte for byte. Fuzz tests compare
// them.
package inflate

import (
	"encoding/binary"
	"errors"
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
// goroutine at a time may use it, again and again, and it then allocates nothing. It takes about 25
// KiB.
type Decoder struct {
	// the next bits of the input, the first one lowest; above the lowest left bits there may be
	// some of the following ones
	bits uint64
	left uint // how many of them were taken from the input and are unused
	pos  int  // the next byte of the input
	out  int  // bytes written to the output

	tables  *tables // of the block: own, or those of fixed codes
	own     tables
	codes   [1 << codeBits]uint32 // of the code lengths' code
	lengths [maxLitLen + maxDist]uint8
	sorted  [numLitLen]uint16
}

// Decode fills dst from the deflate stream at the beginning of src, and ignores the rest of src. It
// stops when dst is full, even if the stream goes on, and returns how many bytes it wrote. If the
// stream ends earlier, n is less than len(dst), and this is no error. Decode may also overwrite the
// bytes of dst after n.
//
// An error is one of this package's. Even then, the n bytes are right.
func (d *Decoder) Decode(dst, src []byte) (n int, err error) {
	d.bits, d.left, d.pos, d.out = 0, 0, 0, 0
	for last := false; !last && d.out < len(dst); {
		if !d.need(src, 3) {
			return d.out, errTruncated
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
			err = errBlockType
		}
		if err != nil {
			return d.out, err
		}
	}
	return d.out, nil
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

// stored copies a block that is not compressed (RFC 1951, section 3.2.4).
func (d *Decoder) stored(dst, src []byte) error {
	d.pos -= int(d.left / 8) // back to the first unused byte
	d.bits, d.left = 0, 0
	if len(src)-d.pos < 4 {
		return errTruncated
	}
	n, complement := binary.LittleEndian.Uint16(src[d.pos:]),
		binary.LittleEndian.Uint16(src[d.pos+2:])
	d.pos += 4
	if n != ^complement {
		return errStored
	}
	want := min(int(n), len(dst)-d.out)
	copied := copy(dst[d.out:d.out+want], src[d.pos:])
	d.out += copied
	d.pos += copied
	if copied < want {
		return errTruncated
	}
	return nil
}

// block decodes a compressed block with the current tables, until it ends or dst is full.
func (d *Decoder) block(dst, src []byte) error {
	ended, err := d.fast(dst, src)
	for !ended && err == nil && d.out < len(dst) {
		ended, err = d.step(dst, src)
	}
	return err
}
