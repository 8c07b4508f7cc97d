package inflate

import "math/bits"

// build makes the table of the codes with the given lengths. The first part of the table has
// 1<<width entries. build returns false if the codes are over-subscribed or incomplete. Two
// incomplete sets are allowed: a single code of one bit, and no codes at all, which is an error
// only if one is used.
func (d *Decoder) build(t []uint32, width int, lengths []uint8, entries []uint32) bool {
	var count, next [maxBits + 2]int
	for _, n := range lengths {
		count[n&maxBits]++
	}
	used := len(lengths) - count[0]
	count[0] = 0
	space := 0 // of 2^15
	for n := 1; n <= maxBits; n++ {
		next[n+1] = next[n] + count[n]
		space += count[n] << (maxBits - n)
	}
	first := t[:1<<width]
	if space != 1<<maxBits {
		if used > 1 || used == 1 && count[1] != 1 {
			return false
		}
		for i := range first {
			first[i] = invalid
		}
	}
	for symbol, n := range lengths {
		if n != 0 {
			d.sorted[next[n]] = uint16(symbol)
			next[n]++
		}
	}
	if used == 1 {
		for i := 0; i < len(first); i += 2 {
			first[i] = entries[d.sorted[0]] + oneBit
		}
		return true
	}

	// Codes are assigned in the order of their lengths. In the input, their highest bit comes
	// first. Each bit of length doubles the part of the table that the codes so far decide.
	code, i := 0, 0
	for n := 1; n <= width && i < used; n++ {
		code <<= 1
		copy(first[1<<(n-1):1<<n], first[:1<<(n-1)])
		for end := i + count[n]; i < end; i++ {
			first[reverse(code, n)] = entries[d.sorted[i]] + uint32(n)*oneBit
			code++
		}
		if i == used {
			for ; n < width; n++ {
				copy(first[1<<n:1<<(n+1)], first[:1<<n])
			}
		}
	}
	d.buildLong(t, width, entries, &count, code, i)
	return true
}

// buildLong adds the subtables for the codes from the i-th on, which are longer than width.
func (d *Decoder) buildLong(t []uint32, width int, entries []uint32, count *[maxBits + 2]int,
	code, i int) {
	begin, size := 1<<width, 0
	index := -1
	for n := width + 1; n <= maxBits; n++ {
		code <<= 1
		for ; count[n] > 0; count[n]-- {
			r := reverse(code, n)
			if at := r & (1<<width - 1); at != index { // this is the first code of a subtable
				begin += size
				more := n - width
				for space := count[n]; space < 1<<more; {
					more++
					space = space<<1 + count[width+more]
				}
				index, size = at, 1<<more
				t[at] = isSpecial | isLink | uint32(width) | uint32(begin)<<valueAt |
					uint32(more)<<codeAt
			}
			e := entries[d.sorted[i]] + uint32(n-width)*oneBit
			for j := r >> width; j < size; j += 1 << (n - width) {
				t[begin+j] = e
			}
			code++
			i++
		}
	}
}

// reverse returns the n lowest bits of code in reverse order.
func reverse(code, n int) int { return int(bits.Reverse16(uint16(code)) >> (16 - n)) }
