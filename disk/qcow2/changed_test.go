package qcow2

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// A table that is read again after the image was opened may have changed since it was validated.
// Whatever it says, reads return something or an error.
func TestTableIsChangedAfterValidation(t *testing.T) {
	const bits, cs = 12, 1 << 12
	changes := map[string]uint64{
		"compressed past the end":       entryCompressed | 1<<40,
		"compressed far past the end":   l2CompressedLast,
		"compressed just at the end":    entryCompressed | (atData+8)<<bits,
		"data past the end":             1 << 40,
		"data at the highest offset":    offsetMask,
		"everything":                    ^uint64(0),
		"zeros":                         entryZero,
		"compressed at the end, longer": entryCompressed | 1<<61 | ((atData+8)<<bits - 1),
	}
	for name, entry := range changes {
		t.Run(name, func(t *testing.T) {
			for _, changed := range [][]int{{0}, {1}, {0, 1}, {1, 2, 3}} {
				im := newImage(bits, 8*cs, 8)
				data := deflated(t, words(cs, 1))
				for i := range 4 {
					im.compressed(i, atData*cs+i*len(data), data)
				}
				got := im.opened(t)
				for _, i := range changed {
					im.put64(im.l2(i), entry)
				}
				for _, n := range []int{512, cs, 4 * cs} {
					for off := int64(0); off < 4*cs; off += cs / 2 {
						_, _ = got.ReadAt(bg, make([]byte, n), off)
						got.Decodes(off)
						require.NoError(t, testtool.Err2(got.Extent(bg, off, got.Size()-off)))
					}
				}
			}
		})
	}
}

// l2CompressedLast is the compressed entry of the highest offset and the greatest length.
const l2CompressedLast = entryCompressed | (entryCompressed - 1)

// The table may also change between two reads of it, when many others are read in between.
func TestTableIsChangedBetweenReads(t *testing.T) {
	const bits, cs = 12, 1 << 12
	r := rand.New(rand.NewPCG(1, 2))
	im := newImage(bits, 64*cs, 64)
	data := deflated(t, words(cs, 1))
	for i := range 32 {
		im.compressed(i, atData*cs+i*len(data), data)
	}
	good := bytes.Clone(im.b)
	got := im.opened(t)
	p := make([]byte, 4*cs)
	for range 150 {
		copy(im.b, good)
		for range r.IntN(4) {
			im.put64(im.l2(r.IntN(32)), r.Uint64()>>r.IntN(64)|entryCompressed*uint64(r.IntN(2)))
		}
		got.tables.init(cs, tableCacheBytes, got.loadTable) // as if it had been dropped
		off := r.Int64N(32 * cs)
		_, _ = got.ReadAt(bg, p[:1+r.IntN(len(p))], off)
	}
}

// shrinkingFile ends at size, also for readers that knew it when it was longer.
type shrinkingFile struct {
	b    []byte
	size int64
}

func (f *shrinkingFile) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(f.b[:f.size]).ReadAt(p, off)
}

// A file that becomes shorter under the reader is an error of storage. It is not io.EOF, which
// means the end of the disk.
func TestFileBecomesShorter(t *testing.T) {
	const bits, cs = 16, 1 << 16
	im := newImage(bits, 8*cs, 3)
	data := deflated(t, words(cs, 1))
	im.compressed(0, (atData+2)*cs, data)
	im.data(1, atData, 1)
	for name, c := range map[string]struct{ size, off, n int64 }{
		"compressed":                      {(atData + 2) * cs, 0, 512},
		"a whole compressed cluster":      {(atData+2)*cs + 512, 0, cs},
		"data":                            {atData * cs, cs, 512},
		"data, within a cluster":          {atData*cs + 512, cs, cs},
		"a table":                         {atL2*cs + 512, cs, 512},
		"a table, at its very end":        {atData*cs - 1, cs, 512},
		"the backing file":                {int64(len(im.b)), 4 * cs, 512},
		"the backing file, in the middle": {int64(len(im.b)), 2 * cs, 4 * cs},
	} {
		t.Run(name, func(t *testing.T) {
			file := &shrinkingFile{im.b, int64(len(im.b))}
			got := testtool.Must(Open(bg, near{file}, file.size, Options{}))(t)
			got.SetBacking(near{&shrinkingFile{make([]byte, 8*cs), 3 * cs}}, 8*cs)
			file.size = c.size
			n, err := got.ReadAt(bg, make([]byte, c.n), c.off)
			require.Zero(t, n)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.NotErrorIs(t, err, io.EOF)
		})
	}
	for _, size := range []int64{atL1*cs + 4, atL2*cs + 512, cs, 200} { // while it is opened
		_, err := Open(bg, near{&shrinkingFile{im.b, size}}, int64(len(im.b)), Options{})
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, size)
		require.NotErrorIs(t, err, io.EOF)
	}
}
