// Package bitset has sets of small numbers: a bit for each, so that a set of a million numbers
// takes 128 KiB. Only AddShared may be called while others use the set.
package bitset

import (
	"iter"
	"math/bits"
	"sync/atomic"
)

// Set is a set of numbers, none of which is negative. The zero value is empty and ready.
type Set []uint64

// New returns an empty set with room for the numbers below n.
func New(n int64) Set { return make(Set, (n+63)/64) }

// Has reports whether a number is in the set. The set need not have room for it.
func (s Set) Has(n int64) bool {
	return uint64(n)/64 < uint64(len(s)) && s[n/64]&(1<<(n%64)) != 0
}

// Add puts a number into the set, and makes room for it.
func (s *Set) Add(n int64) {
	if n/64 >= int64(len(*s)) {
		*s = append(*s, make(Set, n/64+1-int64(len(*s)))...)
	}
	(*s)[n/64] |= 1 << (n % 64)
}

// AddShared is Add while other goroutines add numbers, too. There must be room for the number.
func (s Set) AddShared(n int64) { atomic.OrUint64(&s[n/64], 1<<(n%64)) }

// Remove takes a number out of the set. There must be room for it.
func (s Set) Remove(n int64) { s[n/64] &^= 1 << (n % 64) }

// Len is how many numbers there are.
func (s Set) Len() (n int64) {
	for _, word := range s {
		n += int64(bits.OnesCount64(word))
	}
	return n
}

// Run reports whether the set has the number from, and for how many numbers from it on, below end,
// that is the same.
func (s Set) Run(from, end int64) (has bool, n int64) {
	has = s.Has(from)
	same := uint64(0) // a word of such numbers
	if has {
		same = ^same
	}
	at := from
	for at < end && s.Has(at) == has {
		if at%64 == 0 && at/64 < int64(len(s)) && s[at/64] == same {
			at += 64
		} else {
			at++
		}
	}
	return has, min(at, end) - from
}

// All returns the numbers, the smallest first. Empty words of 64 numbers take no time.
func (s Set) All() iter.Seq[int64] {
	return func(yield func(int64) bool) {
		for i, word := range s {
			for ; word != 0; word &= word - 1 {
				if !yield(int64(i)*64 + int64(bits.TrailingZeros64(word))) {
					return
				}
			}
		}
	}
}
