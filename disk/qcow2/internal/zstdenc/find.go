package zstdenc

import (
	"encoding/binary"
	"math/bits"
)

const (
	longBits  = 15 // of the numbers of entries of the tables
	shortBits = 14

	longMatch = 8 // the least length of a match that is found by the long table
	minMatch  = 4 // and of any other

	// farther is how many bytes without a match make the steps longer by one, a logarithm:
	// incompressible data is soon passed.
	farther = 8
)

// finder finds matches. Each table says where bytes with the same hash were last: eight or five.
type finder struct {
	long  [1 << longBits]uint16
	short [1 << shortBits]uint16
}

func (s *source) load32(i uint16) uint32 { return binary.LittleEndian.Uint32(s[i:]) }
func (s *source) load64(i uint16) uint64 { return binary.LittleEndian.Uint64(s[i:]) }

// The factors are large primes, as libzstd has them.
func hash8(v uint64) uint64 { return v * 0xcf1bbcdcb7a56463 >> (64 - longBits) }
func hash5(v uint64) uint64 { return v << 24 * 889523592379 >> (64 - shortBits) }

// same counts the bytes from a up to n that are the same as those from b on. b < a.
//
//go:norace
func (s *source) same(a, b, n int) int {
	begin := a
	for a+8 <= n {
		x := binary.LittleEndian.Uint64(s[a:]) ^ binary.LittleEndian.Uint64(s[b:])
		if x != 0 {
			return a - begin + bits.TrailingZeros64(x)>>3
		}
		a, b = a+8, b+8
	}
	for a < n && s[a] == s[b] {
		a, b = a+1, b+1
	}
	return a - begin
}

// find divides the first n bytes of s into sequences and literals. It takes the first match it
// finds: at the last offset once more, a long one, or a short one unless there is a long one
// behind.
//
//go:norace
func (f *finder) find(s *source, n int, sequences *sequences, literals *literals) {
	clear(f.long[:])
	clear(f.short[:])
	var (
		limit  = n - 8 // from where on there is nothing to find
		anchor = 0     // everything before this is done
		at     = 1     // not 0, because 0 is an empty entry of the tables
		rep1   = 1     // the last two offsets, as the format begins; they are never before 0
		rep2   = 4
	)
	for at < limit {
		p := uint16(at)
		v := s.load64(p)
		inLong, inShort := hash8(v), hash5(v)
		long, short := f.long[inLong], f.short[inShort]
		f.long[inLong], f.short[inShort] = p, p

		if s.load32(uint16(at+1-rep1)) == uint32(v>>8) {
			at++
			length := minMatch + s.same(at+minMatch, at+minMatch-rep1, n)
			literals.add(s, anchor, at)
			sequences.add(at-anchor, offsetRepeated, length)
			anchor = at + length
		} else {
			var match, length int
			switch {
			case s.load64(long) == v:
				match = int(long)
				length = longMatch + s.same(at+longMatch, match+longMatch, n)
			case s.load32(short) == uint32(v):
				match = int(short)
				v = s.load64(p + 1)
				inLong = hash8(v)
				long = f.long[inLong]
				f.long[inLong] = p + 1
				if s.load64(long) == v {
					at, match = at+1, int(long)
				}
				length = minMatch + s.same(at+minMatch, match+minMatch, n)
			default:
				at += (at-anchor)>>farther + 1
				continue
			}
			for at > anchor && match > 0 && s[at-1] == s[match-1] {
				at, match, length = at-1, match-1, length+1
			}
			rep1, rep2 = at-match, rep1
			literals.add(s, anchor, at)
			sequences.add(at-anchor, rep1+offsetFirst, length)
			anchor = at + length
		}
		// Note these positions of the match, so that it is found again.
		second := uint16(at + 1)
		at = anchor
		if at >= limit {
			break
		}
		v = s.load64(second)
		f.long[hash8(v)], f.short[hash5(v)] = second, second
		last := uint16(at - 2)
		f.long[hash8(s.load64(last))] = last
		last++
		f.short[hash5(s.load64(last))] = last
		// The offset before the last one, without literals: structures of two alternating kinds.
		for at < limit {
			p := uint16(at)
			v := s.load64(p)
			if s.load32(uint16(at-rep2)) != uint32(v) {
				break
			}
			length := minMatch + s.same(at+minMatch, at+minMatch-rep2, n)
			rep1, rep2 = rep2, rep1
			f.long[hash8(v)], f.short[hash5(v)] = p, p
			sequences.add(0, offsetRepeated, length)
			at += length
			anchor = at
		}
	}
	literals.add(s, anchor, n)
}
