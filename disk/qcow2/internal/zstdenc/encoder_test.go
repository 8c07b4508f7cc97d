package zstdenc

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// decoder fails where a frame is not as the format says.
func decoder(t testing.TB) *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	require.NoError(t, err)
	t.Cleanup(d.Close)
	return d
}

// requireFrame encodes p and decodes it.
func requireFrame(t testing.TB, e *Encoder, d *zstd.Decoder, p []byte) (length int) {
	t.Helper()
	before := []byte("before")
	out := e.Encode(before, p)
	require.Equal(t, "before", string(out[:6]))
	frame := out[6:]
	require.LessOrEqual(t, len(frame), len(p)+10)
	got, err := d.DecodeAll(frame, nil)
	require.NoError(t, err, "%d bytes", len(p))
	require.True(t, bytes.Equal(p, got), "%d bytes", len(p))
	var h zstd.Header
	require.NoError(t, h.Decode(frame))
	require.EqualValues(t, len(p), h.FrameContentSize)
	require.True(t, h.SingleSegment)
	return len(frame)
}

// words is a text.
func words(r *rand.Rand, n int) []byte {
	const text = "the quick brown fox jumps over a lazy dog 0x7f == /usr/lib/libc.so.6 kubevirt"
	all := bytes.Fields([]byte(text))
	var b []byte
	for len(b) < n {
		b = append(append(b, all[r.IntN(len(all))]...), ' ')
		if r.IntN(8) == 0 {
			b = strconv.AppendUint(b, r.Uint64(), 36)
		}
	}
	return b[:n]
}

// noise has bytes of an alphabet, some of which are repeated.
func noise(r *rand.Rand, n, alphabet, distance int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.IntN(alphabet))
		if i > distance && r.IntN(3) > 0 {
			b[i] = b[i-1-r.IntN(distance)]
		}
	}
	return b
}

// structures are records of numbers, as tables and programs have them.
func structures(r *rand.Rand, n int) []byte {
	var b []byte
	for i := uint32(0); len(b) < n; i++ {
		b = binary.LittleEndian.AppendUint32(b, i*8)
		b = binary.LittleEndian.AppendUint16(b, uint16(r.IntN(300)))
		b = append(b, make([]byte, r.IntN(12))...)
	}
	return b[:n]
}

func TestSmallSizes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var e Encoder
	d := decoder(t)
	for n := 1; n < 1500; n += 1 + n/300 {
		requireFrame(t, &e, d, make([]byte, n))
		requireFrame(t, &e, d, words(r, n))
		requireFrame(t, &e, d, noise(r, n, 256, n))
		requireFrame(t, &e, d, noise(r, n, 1+r.IntN(255), 1+r.IntN(100)))
	}
}

func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var e Encoder
	d := decoder(t)
	for range 120 {
		n := MaxSize - r.IntN(9)
		if r.IntN(2) == 0 {
			n = 1 + r.IntN(MaxSize)
		}
		requireFrame(t, &e, d, words(r, n))
		requireFrame(t, &e, d, structures(r, n))
		requireFrame(t, &e, d, noise(r, n, 1+r.IntN(256), 1+r.IntN(1000)))
		mixed := append(append(words(r, n/3), noise(r, n/3, 256, n)...), structures(r, n/3+1)...)
		requireFrame(t, &e, d, mixed)
	}
}

// TestEdges has cases that a random input hardly ever has.
func TestEdges(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 3))
	var e Encoder
	d := decoder(t)
	flat := noise(r, MaxSize, 256, MaxSize)
	half := flat[:MaxSize/2]
	for name, c := range map[string]struct {
		most int // bytes
		p    []byte
	}{
		"one byte, repeated":         {20, bytes.Repeat([]byte{7}, MaxSize)},
		"zeros":                      {20, make([]byte, MaxSize)},
		"a match as long as can be":  {30, append([]byte{1, 2, 3, 4}, make([]byte, MaxSize-4)...)},
		"literals to the end":        {MaxSize + 10, append(make([]byte, 64), flat[64:]...)},
		"nothing but literals":       {MaxSize + 10, flat},
		"a match at the last offset": {MaxSize + 10, slices.Concat(flat[:MaxSize-8], flat[:8])},
		"the first half again":       {MaxSize/2 + 100, slices.Concat(half, half)},
		"two bytes in turns":         {30, bytes.Repeat([]byte{1, 2}, MaxSize/2)},
		"matches of four bytes only": {MaxSize, fours(r)},
		"many equal codes":           {200, bytes.Repeat(flat[:40], MaxSize/40)},
	} {
		t.Run(name, func(t *testing.T) {
			require.LessOrEqual(t, requireFrame(t, &e, d, c.p), c.most)
		})
	}
}

// fours has about as many sequences as can be.
func fours(r *rand.Rand) []byte {
	var b []byte
	for len(b) < MaxSize {
		b = binary.LittleEndian.AppendUint32(b, uint32(r.IntN(300))*0x9e3779b1)
		b = append(b, byte(r.IntN(2)))
	}
	return b[:MaxSize]
}

// TestForgets: a frame does not depend on earlier input, nor on its length.
func TestForgets(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 4))
	var used Encoder
	for range 60 {
		n := 1 + r.IntN(MaxSize)
		p := words(r, n)
		if r.IntN(2) == 0 {
			p = noise(r, n, 1+r.IntN(256), 1+r.IntN(1000))
		}
		require.True(t, bytes.Equal(new(Encoder).Encode(nil, p), used.Encode(nil, p)))
	}
}

// TestShares: the states are divided without a rest, and whatever is there gets one.
func TestShares(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	reduced := 0
	for range 5000 {
		var c table
		n, symbols := 0, 2+r.IntN(maxSymbols-1)
		most := 1 + r.IntN(1+r.IntN(500))
		for s := range symbols {
			c.counts[s] = uint32(1 + r.IntN(most))
			if s < symbols-1 && r.IntN(4) == 0 {
				c.counts[s] = 0
			}
			n += int(c.counts[s])
		}
		log := uint8(7 + r.IntN(3))
		c.normalise(log, n, symbols-1)
		sum, largest := 0, int16(0)
		for s, share := range c.shares {
			require.Equal(t, c.counts[s] > 0, share != 0)
			require.GreaterOrEqual(t, share, int16(-1))
			sum += int(max(share, -share))
			largest = max(largest, share)
		}
		require.Equal(t, 1<<log, sum)
		if largest*3 < 1<<log/int16(symbols)*4 {
			reduced++
		}
		c.own.build(log, c.shares[:symbols])
	}
	require.Positive(t, reduced, "some have no large share to take from")
}

// FuzzEncode encodes anything.
func FuzzEncode(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 6))
	f.Add(words(r, 300), uint8(3))
	f.Add(structures(r, 2000), uint8(0))
	f.Add(noise(r, 700, 4, 60), uint8(100))
	d := decoder(f)
	var e Encoder
	f.Fuzz(func(t *testing.T, p []byte, times uint8) {
		if p = bytes.Repeat(p, 1+int(times)); len(p) > 0 {
			requireFrame(t, &e, d, p[:min(len(p), MaxSize)])
		}
	})
}

// BenchmarkEncode compresses a program, beside the library's encoder.
func BenchmarkEncode(b *testing.B) {
	path, err := os.Executable()
	require.NoError(b, err)
	program, err := os.ReadFile(path)
	require.NoError(b, err)
	var own Encoder
	other, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false),
		zstd.WithSingleSegment(true), zstd.WithWindowSize(MaxSize), zstd.WithLowerEncoderMem(true),
		zstd.WithAllLitEntropyCompression(true))
	require.NoError(b, err)
	for name, encode := range map[string]func(dst, p []byte) []byte{
		"zstdenc":   own.Encode,
		"klauspost": func(dst, p []byte) []byte { return other.EncodeAll(p, dst) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(program)))
			b.ReportAllocs()
			var out []byte
			packed := 0
			for b.Loop() {
				packed = 0
				for p := program; len(p) > 0; p = p[min(MaxSize, len(p)):] {
					out = encode(out[:0], p[:min(MaxSize, len(p))])
					packed += len(out)
				}
			}
			b.ReportMetric(float64(packed)*100/float64(len(program)), "%stored")
		})
	}
}
