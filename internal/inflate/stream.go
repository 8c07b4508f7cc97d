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
	inFixed              // fixed codes come next
	inCodes              // the block's own codes come next
	atEnd                // the stream is over
)

// stream decodes deflate streams one after the other as their input comes. Between two calls it may
// be anywhere, even within a block.
type stream struct {
	Decoder
	mode   mode
	final  bool // the block is the last one
	stored int  // bytes that are left of a stored block

	src io.Reader
	buf []byte // of in
	in  []byte // in[pos:] is unused
	err error  // of src

	dst []byte // dst[:out] is output, with the window; behind it is room for turnOut
}

func (s *stream) init(src io.Reader) {
	s.src, s.buf, s.dst = src, make([]byte, streamIn), make([]byte, Window+streamOut+turnOut)
}

// unread gives whole bytes back to the input, so that the next bit is in the byte at pos, or one of
// the last bits of the byte before.
func (s *stream) unread() {
	s.pos -= int(s.left / 8)
	s.left &= 7
	s.bits &= 1<<s.left - 1
}

// align drops the rest of a byte.
func (s *stream) align() {
	s.unread()
	s.bits, s.left = 0, 0
}

// fill reads more input, until there are n unused bytes if the source has that many.
func (s *stream) fill(n int) error {
	s.unread()
	s.in = s.buf[:copy(s.buf, s.in[s.pos:])]
	s.pos = 0
	for empty := 0; len(s.in) < n && s.err == nil; {
		var got int
		got, s.err = s.src.Read(s.buf[len(s.in):])
		s.in = s.buf[:len(s.in)+got]
		if empty++; got > 0 {
			empty = 0
		} else if empty == maxEmptyReads {
			s.err = io.ErrNoProgress
		}
	}
	if s.err != nil && s.err != io.EOF {
		return s.err
	}
	return nil
}

// advance decodes until the output has stop bytes, or at most turnOut more, or the stream ends.
// stop is at most Window+streamOut.
func (s *stream) advance(stop int) (err error) {
	for err == nil && s.out < stop && s.mode != atEnd {
		if len(s.in)-s.pos < headerIn && s.err == nil {
			err = s.fill(headerIn)
			continue
		}
		switch s.mode {
		case inHeader:
			err = s.header()
		case inStored:
			err = s.copyStored(stop)
		default:
			err = s.codes(stop)
		}
	}
	if err == errTruncated { // by now the source has no more
		err = io.ErrUnexpectedEOF
	}
	return err
}

// header begins a block.
func (s *stream) header() error {
	if !s.need(s.in, 3) {
		return errTruncated
	}
	header := s.take(3)
	s.final = header&1 != 0
	switch header >> 1 {
	case 0:
		s.align()
		if len(s.in)-s.pos < 4 {
			return errTruncated
		}
		n, complement := binary.LittleEndian.Uint16(s.in[s.pos:]),
			binary.LittleEndian.Uint16(s.in[s.pos+2:])
		if n != ^complement {
			return errStored
		}
		s.pos += 4
		s.mode, s.stored = inStored, int(n)
	case 1:
		s.mode, s.tables = inFixed, fixedTables()
	case 2:
		s.mode = inCodes
		return s.readTables(s.in)
	default:
		return errBlockType
	}
	return nil
}

// end ends a block.
func (s *stream) end() {
	s.mode = inHeader
	if s.final {
		s.mode = atEnd
	}
}

func (s *stream) copyStored(stop int) error {
	n := copy(s.dst[s.out:min(stop, s.out+s.stored)], s.in[s.pos:])
	s.pos, s.out, s.stored = s.pos+n, s.out+n, s.stored-n
	switch {
	case s.stored == 0:
		s.end()
	case n == 0:
		return errTruncated
	}
	return nil
}

// codes decodes until the block ends, the output has stop bytes, or more input is needed.
func (s *stream) codes(stop int) error {
	room := s.dst[:stop-1+turnOut] // for a whole turn as long as there are less than stop bytes
	ended, err := s.fast(room, s.in)
	for !ended && err == nil && s.out < stop && s.err != nil {
		ended, err = s.step(room, s.in)
	}
	if ended {
		s.end()
	}
	return err
}

// slide makes room for output. Only the window stays.
func (s *stream) slide() {
	if from := s.out - Window; from > 0 {
		copy(s.dst, s.dst[from:s.out])
		s.out = Window
	}
}

// restart begins another stream, which cannot refer to earlier output.
func (s *stream) restart() {
	s.out, s.mode = 0, inHeader
}
