package inflate

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"encoding/binary"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// member compresses content into one gzip member. It flushes after each flush bytes, as parallel
// compressors do; 0: never.
func member(t testing.TB, content []byte, level, flush int) []byte {
	var b bytes.Buffer
	z := testtool.Must(gzip.NewWriterLevel(&b, level))(t)
	z.Name, z.Comment, z.Extra = "a name", "a comment", []byte("extra")
	for len(content) > 0 {
		n := len(content)
		if flush > 0 {
			n = min(n, flush)
		}
		require.NoError(t, testtool.Err(z.Write(content[:n])))
		if content = content[n:]; flush > 0 {
			require.NoError(t, z.Flush())
		}
	}
	require.NoError(t, z.Close())
	return b.Bytes()
}

// TestGzip reads streams of every kind.
func TestGzip(t *testing.T) {
	random := make([]byte, 700_001)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(random)
	mixed := append(append(text(600_000, 3), random...), make([]byte, 900_000)...)
	for _, c := range []struct {
		name    string
		members [][]byte
	}{
		{"nothing", [][]byte{member(t, nil, 6, 0)}},
		{"fixed codes", [][]byte{member(t, []byte("hello"), 6, 0)}},
		{"level 1", [][]byte{member(t, mixed, 1, 0)}},
		{"level 6", [][]byte{member(t, mixed, 6, 0)}},
		{"level 9", [][]byte{member(t, mixed, 9, 0)}},
		{"stored", [][]byte{member(t, mixed, 0, 0)}},
		{"codes alone", [][]byte{member(t, mixed, -2, 0)}},
		{"random", [][]byte{member(t, random, 6, 0)}},
		{"zeros", [][]byte{member(t, make([]byte, 5<<20), 9, 0)}},
		{"flushed", [][]byte{member(t, mixed, 6, 10_000)}},
		{"flushed, stored", [][]byte{member(t, mixed, 0, 77)}},
		{"members", [][]byte{member(t, mixed, 6, 0), member(t, nil, 1, 0),
			member(t, mixed[:192<<10], 1, 0), member(t, []byte("x"), 6, 0),
			member(t, random, 6, 0)}},
		{"many members", manyMembers(t, mixed, 4099)},
	} {
		t.Run(c.name, func(t *testing.T) {
			src := bytes.Join(c.members, nil)
			z := testtool.Must(gzip.NewReader(bytes.NewReader(src)))(t)
			want := testtool.Must(io.ReadAll(z))(t)
			for _, in := range []io.Reader{bytes.NewReader(src),
				iotest.HalfReader(bytes.NewReader(src)),
				iotest.DataErrReader(bytes.NewReader(src))} {
				require.True(t, bytes.Equal(want, testtool.Must(io.ReadAll(NewGzip(in)))(t)))
			}
		})
	}
}

func manyMembers(t testing.TB, content []byte, size int) (all [][]byte) {
	for len(content) > 0 {
		n := min(len(content), size)
		all = append(all, member(t, content[:n], 6, 0))
		content = content[n:]
	}
	return all
}

// TestGzipWrong checks the errors.
func TestGzipWrong(t *testing.T) {
	good := member(t, text(5000, 5), 6, 0)
	changed := func(at int, by byte) []byte {
		p := bytes.Clone(good)
		p[at] ^= by
		return p
	}
	for _, c := range []struct {
		name string
		src  []byte
		want error
	}{
		{"nothing", nil, io.ErrUnexpectedEOF},
		{"a part of a header", good[:7], io.ErrUnexpectedEOF},
		{"a part of a name", good[:20], io.ErrUnexpectedEOF},
		{"a part of the data", good[:len(good)/2], io.ErrUnexpectedEOF},
		{"a part of the sum", good[:len(good)-3], io.ErrUnexpectedEOF},
		{"another method", changed(2, 1), errGzipHeader},
		{"another sum", changed(len(good)-8, 1), errGzipSum},
		{"another size", changed(len(good)-1, 1), errGzipSum},
		{"something behind it", append(bytes.Clone(good), text(12, 1)...), errGzipHeader},
		{"zeros behind it", append(bytes.Clone(good), make([]byte, 100<<10)...), nil},
		{"zeros and more", append(append(bytes.Clone(good), make([]byte, 9999)...), 1), errGzipEnd},
		{"a little behind it", append(bytes.Clone(good), 0x1f), io.ErrUnexpectedEOF},
		{"a name without an end", append([]byte{0x1f, 0x8b, 8, flagName, 9: 0},
			bytes.Repeat([]byte("a"), 2000)...), errGzipHeader},
	} {
		_, err := io.ReadAll(NewGzip(bytes.NewReader(c.src)))
		require.Equal(t, c.want, err, c.name)
	}
	_, err := io.ReadAll(NewGzip(iotest.ErrReader(io.ErrClosedPipe)))
	require.Equal(t, io.ErrClosedPipe, err)
	_, err = io.ReadAll(NewGzip(iotest.TimeoutReader(bytes.NewReader(bytes.Repeat(good, 100)))))
	require.Equal(t, iotest.ErrTimeout, err)
}

// FuzzGzip compares the reader with compress/flate: the same verdict and the same bytes. It makes
// two members from the same deflate data, because the fuzzer could not guess their checksum.
func FuzzGzip(f *testing.F) {
	for _, content := range [][]byte{nil, []byte("hello, hello"), text(2500, 1)} {
		for _, level := range []int{-2, 0, 9} {
			f.Add(deflate(f, content, level))
		}
	}
	f.Add(longCodes().b)
	f.Add(deflate(f, make([]byte, 5000), 9))
	f.Fuzz(func(t *testing.T, src []byte) {
		in := bytes.NewReader(src)
		content, wantErr := io.ReadAll(io.LimitReader(flate.NewReader(in), 1<<16))
		if len(content) == 1<<16 {
			return
		}
		one := append([]byte{0x1f, 0x8b, 8, 9: 0}, src[:len(src)-in.Len()]...)
		one = binary.LittleEndian.AppendUint32(one, crc32.ChecksumIEEE(content))
		one = binary.LittleEndian.AppendUint32(one, uint32(len(content)))
		both := append(bytes.Clone(one), one...)
		got, err := io.ReadAll(NewGzip(bytes.NewReader(both)))
		require.Equal(t, wantErr == nil, err == nil, "%v, and compress/flate: %v", err, wantErr)
		if err == nil {
			require.True(t, bytes.Equal(append(content, content...), got))
		}
	})
}
