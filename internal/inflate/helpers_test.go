package inflate

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// reference decodes with compress/flate, at most size bytes; err is nil if it got them all.
func reference(src []byte, size int) ([]byte, error) {
	p := make([]byte, size)
	n, err := io.ReadFull(flate.NewReader(bytes.NewReader(src)), p)
	return p[:n], err
}

// decode decodes into size bytes, and fails if it touches anything behind them.
func decode(t testing.TB, d *Decoder, src []byte, size int) ([]byte, error) {
	t.Helper()
	const guard = 64
	memory := bytes.Repeat([]byte{0xa5}, size+guard)
	n, err := d.Decode(memory[:size], src)
	require.Equal(t, bytes.Repeat([]byte{0xa5}, guard), memory[size:], "what is behind the output")
	require.LessOrEqual(t, n, size)
	return memory[:n], err
}

// agree decodes with this package and with compress/flate, and compares verdict and bytes.
func agree(t testing.TB, d *Decoder, src []byte, size int) ([]byte, error) {
	t.Helper()
	want, wantErr := reference(src, size)
	got, err := decode(t, d, src, size)
	if n := len(got); wantErr != nil && n > len(want) {
		// compress/flate asks for as many bits as the end-of-block code has, even if a shorter code
		// comes next. So it decodes less of an input that ends too early. With more input it has to
		// decode the same.
		more, _ := reference(append(bytes.Clone(src), make([]byte, 8)...), size)
		require.ErrorIs(t, wantErr, io.ErrUnexpectedEOF)
		require.GreaterOrEqual(t, len(more), n)
		require.True(t, bytes.Equal(more[:n], got))
		return got, err
	}
	require.True(t, bytes.Equal(want, got), "%d bytes, and %d are right: %v, %v", len(got),
		len(want), err, wantErr)
	full := err == nil && len(got) == size
	require.Equal(t, wantErr == nil, full, "%v, and compress/flate: %v", err, wantErr)
	return got, err
}

// deflate compresses with compress/flate.
func deflate(t testing.TB, p []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := testtool.Must(flate.NewWriter(&b, level))(t)
	require.NoError(t, testtool.Err(w.Write(p)))
	require.NoError(t, w.Close())
	return b.Bytes()
}

// text returns size bytes of made-up prose and numbers: codes of many lengths, matches near and
// far.
func text(size int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	words := make([]string, 400)
	for i := range words {
		w := make([]byte, 1+r.IntN(12))
		for j := range w {
			w[j] = 'a' + byte(r.IntN(1+r.IntN(26)))
		}
		words[i] = string(w)
	}
	var b bytes.Buffer
	for b.Len() < size {
		switch r.IntN(24) {
		case 0:
			fmt.Fprintf(&b, "%x\n", r.Uint64())
		case 1:
			b.Write(bytes.Repeat([]byte{byte(r.IntN(256))}, r.IntN(600)))
		case 2:
			b.WriteByte(byte(r.IntN(256)))
		case 3: // short periods
			b.Write(bytes.Repeat([]byte(words[r.IntN(len(words))]), 2+r.IntN(20)))
		default:
			b.WriteString(words[r.IntN(1+r.IntN(len(words)))])
			b.WriteByte(' ')
		}
	}
	return b.Bytes()[:size]
}

// bitWriter builds a stream by hand.
type bitWriter struct {
	b []byte
	n uint // bits used of the last byte, 0 for none
}

// bits appends the n lowest bits of v, the lowest first.
func (w *bitWriter) bits(v, n uint) *bitWriter {
	for i := range n {
		if w.n == 0 {
			w.b = append(w.b, 0)
		}
		w.b[len(w.b)-1] |= byte(v>>i&1) << w.n
		w.n = (w.n + 1) % 8
	}
	return w
}

// code appends the n lowest bits of v, the highest first, as in Huffman codes.
func (w *bitWriter) code(v, n uint) *bitWriter {
	for i := range n {
		w.bits(v>>(n-1-i), 1)
	}
	return w
}

// fixed appends the fixed code of a literal or length symbol.
func (w *bitWriter) fixed(symbol uint) *bitWriter {
	switch {
	case symbol < 144:
		return w.code(0x30+symbol, 8)
	case symbol < 256:
		return w.code(0x190+symbol-144, 9)
	case symbol < 280:
		return w.code(symbol-256, 7)
	}
	return w.code(0xc0+symbol-280, 8)
}

// lengths appends the header of a dynamic block with these code lengths. Each length is written
// directly: the code of code lengths has 4 bits for each of 0 to 15.
func (w *bitWriter) lengths(litlen, dist []uint) *bitWriter {
	w.bits(uint(len(litlen)-257), 5).bits(uint(len(dist)-1), 5).bits(19-4, 4)
	for _, symbol := range codeOrder {
		if symbol < 16 {
			w.bits(4, 3)
		} else {
			w.bits(0, 3)
		}
	}
	for _, n := range append(append([]uint(nil), litlen...), dist...) {
		w.code(n, 4)
	}
	return w
}

// codeLengths returns n code lengths, which are 0 except for those in set.
func codeLengths(n int, set map[int]uint) []uint {
	l := make([]uint, n)
	for symbol, length := range set {
		l[symbol] = length
	}
	return l
}
