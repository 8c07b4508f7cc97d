package inflate

import (
	"encoding/binary"
	"io"
)

const (
	// Window is how far back deflate data may refer. Bytes.
	Window = 32 << 10

	// streamIn and streamOut are how much input and output a stream keeps in memory, without the
	// window. Bytes.
	streamIn  = 128 << 10
	streamOut = 256 << 10
	// headerIn is more than the header of a block takes: 17 bits, 19 code lengths of 3 bits, and
	// 316 lengths of at most 14. Bytes.
	headerIn = 600
	// maxEmptyReads is how often a source may return nothing.
	maxEmptyReads = 100
)

// mode says what comes next in a stream.
type mode uint8

const (
	inHeader mode = iota // the header of a block comes next
	inStored             // the rest of a stored block comes next
	inCodes              // codes come next
	atEnd                // the stream is over
)

// stream makes the decoder decode streams one after the other as their input comes. Behind the
// output, with the window, it has room for turnOut.
func (d *Decoder) stream(src io.Reader) {
	d.src, d.buf, d.dst = src, make([]byte, streamIn), make([]byte, Window+streamOut+turnOut)
}

// unread returns whole bytes to the input, so that the next bit is in the byte at pos, or one of
// the last bits of the byte before.
func (d *Decoder) unread() {
	d.pos -= int(d.left / 8)
	d.left &= 7
	d.bits &= 1<<d.left - 1
}

// align drops the rest of a byte.
func (d *Decoder) align() {
	d.unread()
	d.bits, d.left = 0, 0
}

// fill reads more input, until there are n unused bytes if the source has that many.
func (d *Decoder) fill(n int) error {
	d.unread()
	d.in = d.buf[:copy(d.buf, d.in[d.pos:])]
	d.pos = 0
	for empty := 0; len(d.in) < n && d.err == nil; {
		var got int
		got, d.err = d.src.Read(d.buf[len(d.in):])
		d.in = d.buf[:len(d.in)+got]
		if empty++; got > 0 {
			empty = 0
		} else if empty == maxEmptyReads {
			d.err = io.ErrNoProgress
		}
	}
	if d.err != nil && d.err != io.EOF {
		return d.err
	}
	return nil
}

// advance decodes until the output has stop bytes, or at most turnOut more if dst has room for
// them, or the stream ends. Between two calls it may be anywhere, even within a block.
func (d *Decoder) advance(stop int) (err error) {
	for err == nil && d.out < stop && d.mode != atEnd {
		if len(d.in)-d.pos < headerIn && d.err == nil {
			err = d.fill(headerIn)
			continue
		}
		switch d.mode {
		case inHeader:
			err = d.header()
		case inStored:
			err = d.copyStored(stop)
		default:
			err = d.block(stop)
		}
	}
	return err
}

// header begins a block.
func (d *Decoder) header() error {
	if !d.need(d.in, 3) {
		return errTruncated
	}
	header := d.take(3)
	d.final = header&1 != 0
	switch header >> 1 {
	case 0:
		d.align()
		if len(d.in)-d.pos < 4 {
			return errTruncated
		}
		n, complement := binary.LittleEndian.Uint16(d.in[d.pos:]),
			binary.LittleEndian.Uint16(d.in[d.pos+2:])
		if n != ^complement {
			return errStored
		}
		d.pos += 4
		d.mode, d.stored = inStored, int(n)
	case 1:
		d.mode, d.tables = inCodes, fixedTables()
	case 2:
		d.mode = inCodes
		return d.readTables(d.in)
	default:
		return errBlockType
	}
	return nil
}

// end ends a block.
func (d *Decoder) end() {
	d.mode = inHeader
	if d.final {
		d.mode = atEnd
	}
}

func (d *Decoder) copyStored(stop int) error {
	n := copy(d.dst[d.out:min(stop, d.out+d.stored)], d.in[d.pos:])
	d.pos, d.out, d.stored = d.pos+n, d.out+n, d.stored-n
	switch {
	case d.stored == 0:
		d.end()
	case n == 0:
		return errTruncated
	}
	return nil
}

// block decodes until the block ends, the output has stop bytes, or more input is needed.
func (d *Decoder) block(stop int) error {
	// for a whole turn as long as there are less than stop bytes, if dst has that
	room := d.dst[:min(stop-1+turnOut, len(d.dst))]
	ended, err := d.fast(room, d.in)
	for !ended && err == nil && d.out < stop && d.err != nil {
		ended, err = d.step(room, d.in)
	}
	if ended {
		d.end()
	}
	return err
}

// slide makes room for output. Only the window stays.
func (d *Decoder) slide() {
	if from := d.out - Window; from > 0 {
		copy(d.dst, d.dst[from:d.out])
		d.out = Window
	}
}

// restart begins another stream, which cannot refer to earlier output.
func (d *Decoder) restart() {
	d.out, d.mode = 0, inHeader
}
