package zstdenc

import "math/bits"

// sequences are what a block consists of: literals, and a match behind them.
type sequences struct {
	memory [MaxSize / minMatch]sequence
	n      int

	literals, offsets, matches table
}

// sequence is some literals and a match.
type sequence struct {
	literals uint16 // how many
	match    uint16 // its length, less shortestMatch
	offset   uint32 // one of the following

	literalCode, matchCode, offsetCode uint8
}

const (
	shortestMatch = 3 // that the format has
	// offsetRepeated is the last offset, or where there are no literals the one before it.
	offsetRepeated = 1
	// offsetFirst is added to any other offset.
	offsetFirst = 3
)

func (s *sequences) add(literals, offset, length int) {
	q := &s.memory[s.n&(len(s.memory)-1)]
	s.n++
	q.literals, q.match, q.offset = uint16(literals), uint16(length-shortestMatch), uint32(offset)
}

// How many bits there are behind a code, and which code short lengths have (RFC 8878, section
// 3.1.1.3.2.1.1). Of longer ones, the code grows by one as the length doubles.
var (
	literalBits = [36]uint8{
		16: 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	matchBits = [53]uint8{
		32: 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	literalCodes = codes[[64]uint8](literalBits[:])
	matchCodes   = codes[[128]uint8](matchBits[:])
)

const (
	literalCodeLess = 19 // what the logarithm of a length is less than its code
	matchCodeLess   = 36
)

// codes lists the codes of the lengths from 0 on.
func codes[T [64]uint8 | [128]uint8](bits []uint8) (c T) {
	length := 0
	for code, n := range bits {
		for range 1 << n {
			if length == len(c) {
				return c
			}
			c[length] = uint8(code)
			length++
		}
	}
	return c
}

func literalCode(n uint16) uint8 {
	if n < uint16(len(literalCodes)) {
		return literalCodes[n]
	}
	return uint8(bits.Len16(n)-1) + literalCodeLess
}

func matchCode(n uint16) uint8 {
	if n < uint16(len(matchCodes)) {
		return matchCodes[n]
	}
	return uint8(bits.Len16(n)-1) + matchCodeLess
}

// appendTo appends the sequences section (RFC 8878, section 3.1.1.3.2).
//
//go:norace
func (s *sequences) appendTo(dst []byte) []byte {
	switch n := s.n; {
	case n == 0:
		return append(dst, 0)
	case n < 128:
		dst = append(dst, byte(n))
	default: // fewer than 16 Ki, as every match has four bytes
		dst = append(dst, byte(n>>8+128), byte(n))
	}
	s.literals.reset()
	s.offsets.reset()
	s.matches.reset()
	all := s.memory[:s.n]
	for i := range all {
		q := &all[i]
		q.literalCode, q.matchCode = literalCode(q.literals), matchCode(q.match)
		q.offsetCode = uint8(bits.Len32(q.offset) - 1)
		s.literals.counts[q.literalCode]++
		s.matches.counts[q.matchCode]++
		s.offsets.counts[q.offsetCode]++
	}
	modes := len(dst)
	dst = append(dst, 0)
	literals, dst := s.literals.choose(defaultLiterals, 9, s.n, dst)
	offsets, dst := s.offsets.choose(defaultOffsets, 8, s.n, dst)
	matches, dst := s.matches.choose(defaultMatches, 9, s.n, dst)
	dst[modes] = literals<<6 | offsets<<4 | matches<<2
	return s.appendBits(dst, all)
}

// appendBits appends the codes and what is behind them. They are read from the end.
//
//go:norace
func (s *sequences) appendBits(dst []byte, all []sequence) []byte {
	w := bitWriter{out: dst}
	q := &all[len(all)-1]
	match := s.matches.begin(q.matchCode)
	offset := s.offsets.begin(q.offsetCode)
	literal := s.literals.begin(q.literalCode)
	q.writeBits(&w)
	for i := len(all) - 2; i >= 0; i-- {
		q = &all[i]
		offset = s.offsets.write(&w, offset, q.offsetCode)
		match = s.matches.write(&w, match, q.matchCode)
		literal = s.literals.write(&w, literal, q.literalCode)
		w.flush()
		q.writeBits(&w)
	}
	w.add(uint64(match), uint(s.matches.log))
	w.add(uint64(offset), uint(s.offsets.log))
	w.add(uint64(literal), uint(s.literals.log))
	return w.finish()
}

// writeBits writes what is behind the codes: the lowest bits of each number, 46 in all at most.
//
//go:norace
func (q *sequence) writeBits(w *bitWriter) {
	w.add(uint64(q.literals), uint(literalBits[q.literalCode]))
	w.add(uint64(q.match), uint(matchBits[q.matchCode]))
	w.add(uint64(q.offset), uint(q.offsetCode))
	w.flush()
}
