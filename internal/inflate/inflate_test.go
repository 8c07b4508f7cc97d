package inflate

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const (
	last    = 1 // final block
	stored  = 0 << 1
	fixed   = 1 << 1
	dynamic = 2 << 1
)

func header(kind uint) *bitWriter { return new(bitWriter).bits(kind, 3) }

// TestStreams has a stream for each rule of the format, and its result.
func TestStreams(t *testing.T) {
	ab := func() *bitWriter { // a:1 b:2 end:3 length 3:3; distances 1:1 2:1
		return header(last|dynamic).lengths(codeLengths(258,
			map[int]uint{'a': 1, 'b': 2, 256: 3, 257: 3}), []uint{1, 1})
	}
	full := "1111111111111111"
	for _, c := range []struct {
		name string
		w    *bitWriter
		want string
		err  error
	}{
		{"nothing", new(bitWriter), "", errTruncated},
		{"reserved type", header(last|3<<1).bits(0, 5), "", errBlockType},
		{"stored", header(last|stored).bits(0, 5).bits(3, 16).bits(0xfffc, 16).bits('a',
			8).bits('b', 8).bits('c', 8), "abc", nil},
		{"stored, empty", header(last|stored).bits(0, 5).bits(0, 16).bits(0xffff, 16), "", nil},
		{"stored, wrong complement",
			header(last|stored).bits(0, 5).bits(1, 16).bits(0xffff, 16).bits('a', 8), "",
			errStored},
		{"stored, length missing", header(last|stored).bits(0, 5).bits(3, 16).bits(0xfc, 8), "",
			errTruncated},
		{"stored, data missing",
			header(last|stored).bits(0, 5).bits(3, 16).bits(0xfffc, 16).bits('a', 8), "a",
			errTruncated},
		{"stored after fixed", func() *bitWriter {
			return header(fixed).fixed('x').fixed(256).bits(last|stored, 3).bits(0, 3).bits(1,
				16).bits(0xfffe, 16).bits('y', 8)
		}(), "xy", nil},
		{"fixed", header(last | fixed).fixed('a').fixed(255).fixed(0).fixed(256), "a\xff\x00", nil},
		{"fixed, run", header(last|fixed).fixed('a').fixed(257).code(0, 5).fixed(256), "aaaa", nil},
		{"fixed, longest length", header(last|fixed).fixed('a').fixed(285).code(0, 5).fixed(256),
			strings.Repeat("a", 259), nil},
		{"fixed, length 257+1 by extra bits",
			header(last|fixed).fixed('a').fixed(284).bits(31, 5).code(0, 5).fixed(256),
			strings.Repeat("a", 259), nil},
		{"fixed, symbol 286", header(last|fixed).fixed('a').fixed(286).code(0, 5).fixed(256), "a",
			errCode},
		{"fixed, symbol 287", header(last|fixed).fixed('a').fixed(287).code(0, 5).fixed(256), "a",
			errCode},
		{"fixed, distance 30", header(last|fixed).fixed('a').fixed(257).code(30, 5).fixed(256), "a",
			errCode},
		{"fixed, distance 31", header(last|fixed).fixed('a').fixed(257).code(31, 5).fixed(256), "a",
			errCode},
		{"fixed, too far", header(last|fixed).fixed('a').fixed(257).code(1, 5).fixed(256), "a",
			errDistance},
		{"fixed, too far at the start", header(last|fixed).fixed(257).code(0, 5).fixed(256), "",
			errDistance},
		{"fixed, no end", header(last | fixed).fixed('a').fixed('b'), "ab", errTruncated},
		{"no last block", header(fixed).fixed('a').fixed(256).bits(0, 4), "a", errTruncated},
		{"dynamic", ab().code(0, 1).code(2, 2).code(7, 3).code(1, 1).code(6, 3), "ababa", nil},
		{"dynamic, 287 literals and lengths",
			header(last|dynamic).bits(30, 5).bits(0, 5).bits(0, 4).bits(0, 64), "", errLengths},
		{"dynamic, 31 distances", header(last|dynamic).bits(0, 5).bits(30, 5).bits(0, 4).bits(0,
			64), "", errLengths},
		{"dynamic, header missing", header(last | dynamic), "", errTruncated},
		{"dynamic, length code missing",
			header(last|dynamic).bits(0, 5).bits(0, 5).bits(15, 4).bits(1, 2), "", errTruncated},
		{"dynamic, no length codes", header(last|dynamic).bits(0, 14).bits(0, 12).bits(0, 64), "",
			errCode},
		{"dynamic, length codes over-subscribed",
			header(last|dynamic).bits(0, 14).bits(1|1<<3|1<<6, 12).bits(0, 64), "", errTree},
		{"dynamic, length codes incomplete",
			header(last|dynamic).bits(0, 14).bits(2|2<<3, 12).bits(0, 64), "", errTree},
		{"dynamic, one length code",
			header(last|dynamic).bits(0, 14).bits(1<<6, 12).bits(0, 64).bits(0, 64), "",
			errTruncated},
		{"dynamic, repetition at the start",
			header(last|dynamic).bits(0, 14).bits(1|1<<9, 12).bits(1, 1).bits(0, 64), "",
			errLengths},
		{"dynamic, repetition too long",
			header(last|dynamic).bits(0, 14).bits(1<<6|1<<9, 12).bits(0xff, 8).bits(0xff, 8), "",
			errLengths},
		{"dynamic, over-subscribed literals",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{'a': 1, 'b': 1, 256: 1}),
				[]uint{1, 1}), "", errTree},
		{"dynamic, incomplete literals",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{'a': 1, 256: 2}),
				[]uint{1, 1}), "", errTree},
		{"dynamic, one literal code",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{256: 1}),
				[]uint{1, 1}).code(0, 1), "", nil},
		{"dynamic, one literal code, the other used",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{256: 1}),
				[]uint{1, 1}).code(1, 1), "", errCode},
		{"dynamic, one literal code of two bits",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{256: 2}), []uint{1, 1}), "",
			errTree},
		{"dynamic, no end of block",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{'a': 1, 'b': 1}),
				[]uint{1, 1}).bits(0, 2), "aa", errTruncated},
		{"dynamic, no literals",
			header(last|dynamic).lengths(codeLengths(257, nil), []uint{1, 1}).bits(0, 8), "",
			errCode},
		{"dynamic, over-subscribed distances",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{'a': 1, 256: 1}),
				[]uint{1, 1, 1}), "", errTree},
		{"dynamic, incomplete distances",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{'a': 1, 256: 1}),
				[]uint{2, 2}), "", errTree},
		{"dynamic, no distances, none used",
			header(last|dynamic).lengths(codeLengths(257, map[int]uint{'a': 1, 256: 1}),
				[]uint{0}).bits(0, 1).bits(1, 1), "a", nil},
		{"dynamic, no distances, one used",
			header(last|dynamic).lengths(codeLengths(258, map[int]uint{'a': 1, 256: 2, 257: 2}),
				[]uint{0}).
				code(0, 1).code(3, 2).bits(0, 8), "a", errCode},
		{"dynamic, one distance",
			header(last|dynamic).lengths(codeLengths(258, map[int]uint{'a': 1, 256: 2, 257: 2}),
				[]uint{1}).
				code(0, 1).code(3, 2).bits(0, 1).code(2, 2), "aaaa", nil},
		{"dynamic, one distance, the other used",
			header(last|dynamic).lengths(codeLengths(258, map[int]uint{'a': 1, 256: 2, 257: 2}),
				[]uint{1}).
				code(0, 1).code(3, 2).bits(1, 1).code(2, 2), "a", errCode},
		{"dynamic, codes of 15 bits", longCodes(), full + "abcd", nil},
		{"dynamic, a repetition that ends with the lengths", repeatedToTheEnd(), "\xff", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Decode it alone, and with more input and room behind it, so that both loops see it.
			for _, slack := range []int{0, 1024} {
				src := append(bytes.Clone(c.w.b), make([]byte, slack)...)
				for _, size := range []int{len(c.want), len(c.want) + 1, len(c.want) + 1024} {
					got, err := agree(t, new(Decoder), src, size)
					if size == len(c.want) && c.err != errTruncated {
						require.NoError(t, err, "it is full before the error")
					}
					if size > len(c.want) && (slack == 0 || c.err != errTruncated) {
						require.Equal(t, c.err, err)
						require.Equal(t, c.want, string(got))
					}
				}
			}
		})
	}
}

// longCodes is a block with codes of all lengths from 1 bit to 13, and of 15.
func longCodes() *bitWriter {
	set := map[int]uint{'1': 1, 256: 13, 'a': 15, 'b': 15, 'c': 15, 'd': 15}
	for i := range 11 {
		set[i] = uint(i) + 2
	}
	w := header(last|dynamic).lengths(codeLengths(257, set), []uint{1, 1})
	for range 16 {
		w.code(0, 1)
	}
	for i := range uint(4) {
		w.code(0x7ffc+i, 15)
	}
	return w.code(0x1ffe, 13)
}

// repeatedToTheEnd is a block whose last code lengths are a repetition, as zlib writes them.
func repeatedToTheEnd() *bitWriter {
	w := header(last|dynamic).bits(0, 5).bits(4-1, 5).bits(18-4, 4)
	for _, symbol := range codeOrder[:18] {
		n := map[uint8]uint{16: 3, 18: 3, 1: 1, 2: 2}[symbol]
		w.bits(n, 3)
	}
	// 1: 0, 2: 10, 16: 110, 18: 111
	// 255 zeros; literal 255 and the end, of one bit each
	w.code(7, 3).bits(127, 7).code(7, 3).bits(117-11, 7).code(0, 1).code(0, 1)
	// four distances of two bits: one, and three times the same
	w.code(2, 2).code(6, 3).bits(0, 2)
	return w.code(0, 1).code(1, 1)
}

// TestSymbols decodes every length with every distance, at both ends of their extra bits.
func TestSymbols(t *testing.T) {
	var d Decoder
	prefix := text(32<<10, 1)
	for distance, e := range distEntries[:maxDist] {
		w := header(stored).bits(0, 5).bits(32<<10, 16).bits(0x7fff, 16)
		w.b = append(w.b, prefix...)
		w.bits(last|fixed, 3)
		want := bytes.Clone(prefix)
		for length := uint(257); length <= 285; length++ {
			for _, ones := range []uint{0, 1<<16 - 1} {
				shortest, n := uint(litLenEntries[length]>>valueAt&valueMask),
					uint(litLenEntries[length]&takeMask)
				nearest, far := uint(e>>valueAt&valueMask), uint(e&takeMask)
				w.fixed(length).bits(ones, n).code(uint(distance), 5).bits(ones, far)
				from := uint(len(want)) - nearest - ones&(1<<far-1)
				for i := range shortest + ones&(1<<n-1) {
					want = append(want, want[from+i])
				}
			}
		}
		w.fixed(256)
		for _, slack := range []int{0, 512} {
			src := append(bytes.Clone(w.b), make([]byte, slack)...)
			got := testtool.Must(agree(t, &d, src, len(want)+slack))(t)
			require.True(t, bytes.Equal(want, got), "distance code %d", distance)
		}
	}
}

// TestNearMatches has every length at every distance up to those that are copied in the largest
// steps. The bytes before each match are new: if a step were too large, it would copy bytes that
// are not written yet.
func TestNearMatches(t *testing.T) {
	var d Decoder
	r := rand.New(rand.NewPCG(9, 9))
	// symbol is the last one from first to last whose smallest value is at most v, and the rest of
	// v.
	symbol := func(entries []uint32, first, last, v uint) (s, rest uint) {
		for s = last; s > first && uint(entries[s]>>valueAt&valueMask) > v; s-- {
		}
		return s, v - uint(entries[s]>>valueAt&valueMask)
	}
	for distance := uint(1); distance <= 36; distance++ {
		w := header(last | fixed)
		var want []byte
		for length := uint(3); length <= 258; length++ {
			for range distance {
				b := byte(r.Uint32())
				w.fixed(uint(b))
				want = append(want, b)
			}
			s, rest := symbol(litLenEntries[:], 257, 285, length)
			w.fixed(s).bits(rest, uint(litLenEntries[s]&takeMask))
			s, rest = symbol(distEntries[:], 0, maxDist-1, distance)
			w.code(s, 5).bits(rest, uint(distEntries[s]&takeMask))
			for range length {
				want = append(want, want[uint(len(want))-distance])
			}
		}
		w.fixed(256)
		for _, slack := range []int{0, 512} {
			got := testtool.Must(agree(t, &d, append(bytes.Clone(w.b), make([]byte, slack)...),
				len(want)+slack))(t)
			require.True(t, bytes.Equal(want, got), "distance %d", distance)
		}
	}
}

// TestLongestMatch ends a stream with a match of the most bits, 48, at every position within a
// byte, so that its last bit is also the last bit of the input.
func TestLongestMatch(t *testing.T) {
	var d Decoder
	prefix := text(32<<10, 8)
	litlen, dist := map[int]uint{256: 1, 0: 2, 1: 3, 284: 15, 283: 15}, make([]uint, 30)
	for n := range uint(11) {
		litlen[2+int(n)] = n + 4 // to 14
	}
	for n := range uint(14) {
		dist[n] = n + 1
	}
	dist[28], dist[29] = 15, 15
	for lead := range uint(24) {
		w := header(stored).bits(0, 5).bits(32<<10, 16).bits(0x7fff, 16)
		w.b = append(w.b, prefix...)
		w.bits(last|dynamic, 3).lengths(codeLengths(285, litlen), dist)
		want := bytes.Clone(prefix)
		for n := lead + 2; n > 0; {
			if n == 3 { // literal 1
				w.code(6, 3)
				want, n = append(want, 1), 0
			} else {
				w.code(2, 2)
				want, n = append(want, 0), n-2
			}
		}
		// 258 bytes from 32 KiB before
		w.code(0x7fff, 15).bits(31, 5).code(0x7fff, 15).bits(0x1fff, 13)
		want = append(want, want[len(want)-32<<10:][:258]...)
		alone := bytes.Clone(w.b)
		got := testtool.Must(agree(t, &d, alone, len(want)))(t)
		require.True(t, bytes.Equal(want, got), lead)
		w.code(0, 1)
		got, err := agree(t, &d, w.b, len(want)+1)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), lead)
		if len(w.b) > len(alone) { // the end begins a byte
			_, err = d.Decode(make([]byte, len(want)+1), alone)
			require.Equal(t, errTruncated, err)
		}
	}
}

// TestLevels decodes what compress/flate makes from several kinds of content, with less room than
// needed, just enough, and more.
func TestLevels(t *testing.T) {
	var d Decoder
	noise := make([]byte, 70<<10)
	r := rand.New(rand.NewPCG(7, 7))
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	for name, content := range map[string][]byte{
		"text": text(200<<10, 2), "noise": noise, "zeros": make([]byte, 100<<10),
		"short":            []byte("short"),
		"skewed":           bytes.Repeat([]byte("aaaaaaaaaaaaaaabaaaaaac"), 300),
		"noise, then text": append(noise[:9000:9000], text(9000, 3)...),
	} {
		for _, level := range []int{-2, 0, 1, 6, 9} {
			t.Run(fmt.Sprintf("%s, level %d", name, level), func(t *testing.T) {
				src := deflate(t, content, level)
				for _, size := range []int{0, 1, len(content) / 2, len(content) - 1, len(content),
					len(content) + 1, len(content) + 1000} {
					for _, garbage := range []int{0, 511} {
						got := testtool.Must(agree(t, &d,
							append(src[:len(src):len(src)], noise[:garbage]...), size))(t)
						require.True(t, bytes.Equal(content[:min(size, len(content))], got))
					}
				}
			})
		}
	}
}

// TestTruncated cuts streams at every byte.
func TestTruncated(t *testing.T) {
	var d Decoder
	content := text(1200, 4)
	for _, level := range []int{-2, 0, 1, 9} {
		src := deflate(t, content, level)
		for n := range src {
			got, err := agree(t, &d, src[:n:n], len(content))
			if len(got) < len(content) {
				require.Equal(t, errTruncated, err, "%d of %d bytes", n, len(src))
			}
		}
	}
	for n := range longCodes().b {
		if got, err := agree(t, &d, longCodes().b[:n], 20); len(got) < 20 {
			require.Equal(t, errTruncated, err)
		}
	}
}

// TestDamaged changes bits in streams, so that every check sees input that nobody wrote on purpose.
func TestDamaged(t *testing.T) {
	var d Decoder
	r := rand.New(rand.NewPCG(5, 5))
	content := text(12000, 5)
	seen := make(map[error]int)
	for _, level := range []int{-2, 0, 1, 6} {
		src := deflate(t, content, level)
		for range 1000 {
			damaged := bytes.Clone(src)
			for range 1 + r.IntN(3) {
				at := r.IntN(len(damaged))
				if r.IntN(2) == 0 {
					at = r.IntN(100) // the code lengths
				}
				damaged[at] ^= 1 << r.IntN(8)
			}
			if r.IntN(20) == 0 {
				damaged = damaged[:r.IntN(len(damaged))]
			}
			_, err := agree(t, &d, damaged, len(content))
			seen[err]++
		}
	}
	for _, err := range []error{nil, errTruncated, errBlockType, errStored, errLengths, errTree,
		errDistance} {
		require.Positive(t, seen[err], "%v", err)
	}
}

func TestNoAllocations(t *testing.T) {
	var d Decoder
	content := text(64<<10, 6)
	src, dst := deflate(t, content, 6), make([]byte, 64<<10)
	require.Zero(t, testing.AllocsPerRun(10, func() { _, _ = d.Decode(dst, src) }))
	require.Equal(t, content, dst)
}

// FuzzDecode compares the decoder with compress/flate: the same verdict and the same bytes.
func FuzzDecode(f *testing.F) {
	// Small inputs: the fuzzer then spends its time on finding new cases, not on making long inputs
	// shorter.
	for _, content := range [][]byte{nil, []byte("hello, hello, hello"), text(120, 1)} {
		for _, level := range []int{-2, 0, 9} {
			f.Add(deflate(f, content, level), uint16(len(content)), uint16(0))
		}
	}
	f.Add(deflate(f, make([]byte, 5000), 9), uint16(5000), uint16(0))
	f.Add(longCodes().b, uint16(20), uint16(100))
	f.Fuzz(func(t *testing.T, src []byte, size, slack uint16) {
		// With input behind them, even the short streams that a fuzzer likes reach the fast loop.
		agree(t, new(Decoder), append(src, make([]byte, slack%2048)...), int(size))
	})
}
