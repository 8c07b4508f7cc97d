package inflate

import (
	"encoding/binary"
	"errors"
	"io"
)

// Checkpoint has what a reader needs to continue in the middle of a stream, besides the input from
// there on.
type Checkpoint struct {
	In  int64 // bits of input before it
	Out int64 // bytes of output before it
	// State is the position within a block, and the block's compression. At most MaxState bytes.
	State []byte
	// Tail is the output before it, at most Window bytes of it. In a Checkpoint from Mark, it is
	// valid until the call returns.
	Tail []byte
}

// MaxState is the largest size of a State: the mode, whether the block is the last one, the rest of
// a stored block (2 bytes), the numbers of code lengths of both kinds (2, 1), and these lengths,
// two in a byte. Bytes.
const (
	MaxState = stateHead + (maxLitLen+maxDist+1)/2

	stateHead = 7
)

// maxOver is how far a checkpoint may be behind its place: as much as one turn decodes. Bytes.
const maxOver = turnOut

// ErrCheckpoint says that a checkpoint is not valid.
var ErrCheckpoint = errors.New("a checkpoint of the gzip data contradicts itself")

// checkpoint returns a checkpoint of the stream's current position.
func (g *Gzip) checkpoint() Checkpoint {
	s := &g.s
	s.unread()
	state := make([]byte, stateHead, MaxState)
	state[0] = byte(s.mode)
	if s.final {
		state[1] = 1
	}
	binary.LittleEndian.PutUint16(state[2:], uint16(s.stored))
	if s.mode == inCodes {
		binary.LittleEndian.PutUint16(state[4:], uint16(s.litlen))
		state[6] = byte(s.dist)
		for i, n := range s.lengths[:s.litlen+s.dist] {
			if i%2 == 0 {
				state = append(state, n)
			} else {
				state[len(state)-1] |= n << 4
			}
		}
	}
	return Checkpoint{
		In:    (s.base+int64(s.pos))*8 - int64(s.left),
		Out:   s.start + int64(s.out),
		State: state,
		Tail:  s.dst[max(0, s.out-Window):s.out],
	}
}

// ResumeGzip continues at a checkpoint, and returns the output from off on, which is the place of
// the checkpoint. src is the input without its first c.In/8 bytes.
//
// ResumeGzip cannot tell whether the checkpoint belongs to that input: the caller has to verify the
// output. It does not check the member's checksum.
func ResumeGzip(src io.Reader, c Checkpoint, off int64) (*Gzip, error) {
	over := c.Out - off
	if over < 0 || over > maxOver || over > int64(len(c.Tail)) || len(c.Tail) > Window || c.In < 0 {
		return nil, ErrCheckpoint
	}
	g := &Gzip{partial: true, members: 1}
	g.s.init(src)
	if err := g.s.resume(c); err != nil {
		return nil, err
	}
	g.from = g.s.out - int(over)
	return g, nil
}

func (s *stream) resume(c Checkpoint) error {
	p := c.State
	if len(p) < stateHead || p[0] > byte(atEnd) || p[1] > 1 {
		return ErrCheckpoint
	}
	s.mode, s.final = mode(p[0]), p[1] == 1
	s.stored = int(binary.LittleEndian.Uint16(p[2:]))
	skip := uint(c.In % 8)
	if s.mode == inStored && skip != 0 {
		return ErrCheckpoint
	}
	switch s.mode {
	case inFixed:
		s.tables = fixedTables()
	case inCodes:
		s.litlen, s.dist = int(binary.LittleEndian.Uint16(p[4:])), int(p[6])
		n := s.litlen + s.dist
		if s.litlen > maxLitLen || s.dist > maxDist || len(p) != stateHead+(n+1)/2 {
			return ErrCheckpoint
		}
		for i := range s.lengths[:n] {
			s.lengths[i] = p[stateHead+i/2] >> (i % 2 * 4) & maxBits
		}
		if s.buildTables() != nil {
			return ErrCheckpoint
		}
	}
	s.base, s.out = c.In/8, copy(s.dst, c.Tail)
	s.start = c.Out - int64(s.out)
	if skip > 0 {
		if err := s.fill(1); err != nil {
			return err
		}
		if !s.need(s.in, skip) {
			return io.ErrUnexpectedEOF
		}
		s.take(skip)
	}
	return nil
}
