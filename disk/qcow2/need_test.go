package qcow2

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// notedFile notes where it is read.
type notedFile struct {
	*bytes.Reader
	begin, end []int64
}

func (f *notedFile) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	f.begin, f.end = append(f.begin, off), append(f.end, off+int64(len(p)))
	return f.Reader.ReadAt(p, off)
}

// TestNeed reads what Need tells of, and compares what is read of the file.
func TestNeed(t *testing.T) {
	const bits, cs = 16, 1 << 16
	im := newImage(bits, 12*cs, 8)
	im.data(0, atData, 'a')
	im.data(1, atData+1, 'b')
	im.put64(im.l2(3), entryZero)
	at := (atData + 2) << bits
	for _, i := range []int{5, 6, 8} {
		data := deflated(t, words(cs, uint64(i)))
		im.compressed(i, at, data)
		at += len(data)
	}
	im.data(9, atData+6, 'c')
	im.b = im.b[:(atData+6)<<bits+1000] // the file ends within the last cluster
	file := &notedFile{Reader: bytes.NewReader(im.b)}
	got, err := Open(bg, file, int64(len(im.b)), Options{})
	require.NoError(t, err)
	_, ok := got.Need(0, cs)
	require.False(t, ok, "the table has to be read")
	for _, off := range []int64{-1, 12 * cs} {
		_, ok = got.Need(off, 1)
		require.False(t, ok)
	}
	_, err = got.ReadAt(bg, make([]byte, 1), 11*cs)
	require.NoError(t, err)

	r := rand.New(rand.NewPCG(1, 1))
	seen := map[Kind]int{}
	for range 2000 {
		off := r.Int64N(got.Size())
		length := 1 + r.Int64N(2*cs)
		need, ok := got.Need(off, length)
		require.True(t, ok)
		require.Positive(t, need.N)
		require.LessOrEqual(t, need.N, min(length, got.Size()-off))
		file.begin, file.end = nil, nil
		_, err := got.ReadAt(bg, make([]byte, need.N), off)
		require.NoError(t, err)
		if need.Length == 0 {
			require.Empty(t, file.begin, "%+v", need)
			continue
		}
		seen[need.Kind]++
		require.Equal(t, []int64{need.Off}, file.begin)
		require.Equal(t, []int64{need.Off + need.Length}, file.end)
	}
	require.NotZero(t, seen[KindData])
	require.NotZero(t, seen[KindCompressed])
}
