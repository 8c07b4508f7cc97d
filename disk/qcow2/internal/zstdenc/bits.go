package zstdenc

import "encoding/binary"

// bitWriter appends bits, from the lowest of each byte on.
type bitWriter struct {
	out  []byte
	bits uint64
	n    uint // how many there are in bits
}

// add adds the lowest n bits of v. Between two calls of flush there is room for 57 of them.
func (w *bitWriter) add(v uint64, n uint) {
	w.bits |= v & (1<<(n&63) - 1) << (w.n & 63)
	w.n += n
}

// flush appends the bytes that are complete.
func (w *bitWriter) flush() {
	done := w.n >> 3
	w.out = binary.LittleEndian.AppendUint64(w.out, w.bits)[:len(w.out)+int(done)]
	w.bits >>= done << 3 & 63
	w.n &= 7
}

// bytes is everything, with zeros up to a byte.
func (w *bitWriter) bytes() []byte {
	w.n += 7
	w.flush()
	return w.out
}

// finish adds the end bit: a reader begins at the end, and this bit shows where the data ends.
func (w *bitWriter) finish() []byte {
	w.flush()
	w.add(1, 1)
	return w.bytes()
}
