package inflate

import "encoding/binary"

const (
	// The most that one turn of the fast loop reads and writes. It reads eight bytes twice, the
	// second time seven bytes further. It writes two literals and a match, and a copy of 32 bytes
	// may at first write too much. Bytes.
	turnIn  = 16
	turnOut = 2 + 258 + 32
)

// fast decodes while there is plenty of input and of room. It reports whether the block ended.
//
// In here, only the lowest six bits of left count: entries are subtracted as they are. The race
// detector skips this loop, which would take most of a test's time. It watches Decode, so it still
// finds two goroutines with one Decoder.
//
//go:norace
func (d *Decoder) fast(dst, src []byte) (ended bool, err error) {
	bits, left, pos, out := d.bits, uint64(d.left), d.pos, d.out
	t := d.tables
	lastIn, lastOut := len(src)-turnIn, len(dst)-turnOut
	for pos <= lastIn && out <= lastOut {
		bits |= binary.LittleEndian.Uint64(src[pos:]) << (left & 63)
		pos += int(^left >> 3 & 7)
		left |= 56
		e := uint64(t.litlen[bits&(1<<litLenBits-1)])
		if e&isLiteral != 0 {
			bits >>= e & takeMask
			left -= e
			dst[out] = byte(e >> valueAt)
			out++
			e = uint64(t.litlen[bits&(1<<litLenBits-1)])
			if e&isLiteral != 0 {
				bits >>= e & takeMask
				left -= e
				dst[out] = byte(e >> valueAt)
				out++
				e = uint64(t.litlen[bits&(1<<litLenBits-1)])
				if e&isLiteral != 0 {
					bits >>= e & takeMask
					left -= e
					dst[out] = byte(e >> valueAt)
					out++
					continue
				}
			}
		}
		// At least 56-22 bits are available. A length with its code has at most 20.
		if e&isSpecial != 0 {
			if e&isLink != 0 {
				bits >>= litLenBits
				left -= litLenBits
				e = uint64(t.litlen[(e>>valueAt&valueMask+
					bits&(1<<(e>>codeAt&codeMask)-1))&(litLenSize-1)])
			}
			if e&isLiteral != 0 {
				dst[out] = byte(e >> valueAt)
				out++
				bits >>= e & takeMask
				left -= e
				continue
			}
			if e&isSpecial != 0 {
				if ended = e&isEnd != 0; !ended {
					err = errCode
				}
				bits >>= e & takeMask
				left -= e
				break
			}
		}
		length := int(e>>valueAt&valueMask + bits&(1<<(e&takeMask)-1)>>(e>>codeAt&codeMask))
		bits >>= e & takeMask
		left -= e

		bits |= binary.LittleEndian.Uint64(src[pos:]) << (left & 63)
		pos += int(^left >> 3 & 7)
		left |= 56
		e = uint64(t.dist[bits&(1<<distBits-1)])
		if e&isSpecial != 0 {
			if e&isLink != 0 {
				bits >>= distBits
				left -= distBits
				e = uint64(t.dist[(e>>valueAt&valueMask+bits&(1<<(e>>codeAt&codeMask)-1))&(distSize-
					1)])
			}
			if e&isSpecial != 0 {
				err = errCode
				break
			}
		}
		distance := int(e>>valueAt&valueMask + bits&(1<<(e&takeMask)-1)>>(e>>codeAt&codeMask))
		bits >>= e & takeMask
		left -= e
		from := out - distance
		if from < 0 {
			err = errDistance
			break
		}
		to := dst[out : out+length+32]
		source := dst[from : from+len(to)]
		out += length
		switch {
		case distance >= 16:
			*(*[16]byte)(to) = *(*[16]byte)(source)
			*(*[16]byte)(to[16:]) = *(*[16]byte)(source[16:])
			for i := 32; i < length; i += 16 {
				*(*[16]byte)(to[i:]) = *(*[16]byte)(source[i:])
			}
		case distance == 1:
			word := uint64(source[0]) * 0x0101010101010101
			for i := 0; i < length; i += 8 {
				binary.LittleEndian.PutUint64(to[i:], word)
			}
		default:
			if distance < 8 {
				// Copy the first eight bytes one by one. Then copy from a multiple of the distance
				// back.
				for i := range 8 {
					to[i] = source[i]
				}
				back := int(multiple[distance&7])
				to = to[8:]
				source = source[8+distance-back:]
				length -= 8
			}
			for i := 0; i < length; i += 8 {
				binary.LittleEndian.PutUint64(to[i:], binary.LittleEndian.Uint64(source[i:]))
			}
		}
	}
	d.bits, d.left, d.pos, d.out = bits, uint(left&63), pos, out
	return ended, err
}

// multiple is the smallest multiple of each distance below 8 that is at least 8.
var multiple = [8]uint8{2: 8, 3: 9, 4: 8, 5: 10, 6: 12, 7: 14}
