package inflate

import "testing"

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
