package inflate

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
)

// The errors of a gzip file, besides those of its deflate data.
var (
	errGzipHeader = errors.New("the gzip header is not valid")
	errGzipSum    = errors.New("the check sum of the gzip data is wrong")
	errGzipEnd    = errors.New("data follows the zeros at the end of the gzip data")
)

// Gzip reads gzip members, one after the other, as one stream. One goroutine at a time may use it.
type Gzip struct {
	s       Decoder
	from    int // offset in s.dst of the output that was not returned yet
	err     error
	between bool // a header comes next
	members int

	sum  uint32 // of the member so far
	size uint32 // bytes of the member so far
}

// NewGzip reads members from the beginning of src. It may read ahead.
func NewGzip(src io.Reader) *Gzip {
	g := &Gzip{between: true}
	g.s.stream(src)
	return g
}

func (g *Gzip) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for g.from == g.s.out {
		if g.err != nil {
			return 0, g.err
		}
		g.err = g.more()
	}
	n := copy(p, g.s.dst[g.from:g.s.out])
	g.from += n
	return n, nil
}

// more decodes more. All earlier output was returned.
func (g *Gzip) more() error {
	s := &g.s
	if g.between {
		if err := g.header(); err != nil {
			return err
		}
	}
	if s.out >= Window+streamOut {
		s.slide()
	}
	g.from = s.out
	err := s.advance(Window + streamOut)
	if err == errTruncated { // the source has no more by now
		err = io.ErrUnexpectedEOF
	}
	part := s.dst[g.from:s.out]
	g.sum = crc32.Update(g.sum, crc32.IEEETable, part)
	g.size += uint32(len(part))
	if err == nil && s.mode == atEnd {
		err = g.trailer()
	}
	return err
}

// The optional parts of a header (RFC 1952, section 2.3.1).
const (
	flagSum     = 1 << 1
	flagExtra   = 1 << 2
	flagName    = 1 << 3
	flagComment = 1 << 4
)

// header reads a member's header. io.EOF: there is no further member.
func (g *Gzip) header() error {
	s := &g.s
	if len(s.in) == s.pos {
		if err := s.fill(1); err != nil {
			return err
		}
		if len(s.in) == 0 && g.members > 0 {
			return io.EOF
		}
	}
	if g.members > 0 && s.in[s.pos] == 0 {
		return g.padding()
	}
	p, err := g.take(10)
	if err != nil {
		return err
	}
	if p[0] != 0x1f || p[1] != 0x8b || p[2] != 8 {
		return errGzipHeader
	}
	flags := p[3]
	sum := crc32.ChecksumIEEE(p)
	// skip reads and ignores n bytes.
	skip := func(n int) error {
		for err = nil; n > 0 && err == nil; {
			if p, err = g.take(min(n, headerIn)); err == nil {
				sum = crc32.Update(sum, crc32.IEEETable, p)
				n -= len(p)
			}
		}
		return err
	}
	if flags&flagExtra != 0 {
		if err := skip(2); err != nil {
			return err
		}
		if err := skip(int(binary.LittleEndian.Uint16(p))); err != nil {
			return err
		}
	}
	for _, flag := range []byte{flagName, flagComment} {
		for more, n := flags&flag != 0, 0; more; n++ {
			if err := skip(1); err != nil {
				return err
			}
			if more = p[0] != 0; more && n == maxHeaderText {
				return errGzipHeader
			}
		}
	}
	if flags&flagSum != 0 {
		want := uint16(sum)
		if p, err = g.take(2); err != nil {
			return err
		}
		if binary.LittleEndian.Uint16(p) != want {
			return errGzipHeader
		}
	}
	s.restart()
	g.members++
	g.between, g.sum, g.size = false, 0, 0
	return nil
}

// padding reads the zeros that may follow the last member, as on a medium with blocks. io.EOF:
// nothing else follows.
func (g *Gzip) padding() error {
	for s := &g.s; ; {
		for ; s.pos < len(s.in); s.pos++ {
			if s.in[s.pos] != 0 {
				return errGzipEnd
			}
		}
		if err := s.fill(1); err != nil {
			return err
		}
		if len(s.in) == s.pos {
			return io.EOF
		}
	}
}

// maxHeaderText is how long the name and the comment of a member may be, as in the standard
// library. Bytes.
const maxHeaderText = 511

// trailer reads a member's trailer.
func (g *Gzip) trailer() error {
	g.s.align()
	p, err := g.take(8)
	if err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(p) != g.sum || binary.LittleEndian.Uint32(p[4:]) != g.size {
		return errGzipSum
	}
	g.between = true
	return nil
}

// take returns the next n bytes of the input, at most headerIn. They are valid until the next call.
func (g *Gzip) take(n int) ([]byte, error) {
	s := &g.s
	if len(s.in)-s.pos < n {
		if err := s.fill(n); err != nil {
			return nil, err
		}
		if len(s.in) < n {
			return nil, io.ErrUnexpectedEOF
		}
	}
	s.pos += n
	return s.in[s.pos-n : s.pos], nil
}
