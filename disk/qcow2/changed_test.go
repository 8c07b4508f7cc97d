package qcow2

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

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

// stuckFile stops to answer when stuck is closed, until back is closed.
type stuckFile struct {
	*bytes.Reader
	stuck, back chan struct{}
	asked       atomic.Int64
}

func (f *stuckFile) ReadAt(p []byte, off int64) (int, error) {
	select {
	case <-f.stuck:
		f.asked.Add(1)
		<-f.back
	default:
	}
	return f.Reader.ReadAt(p, off)
}

// The reader of a connection asks whether a command is worth another processor. The answer must not
// wait for storage that hangs: not for a table that has to be read, and not for one that another
// reader is about to read.
func TestDecodesDoesNotWaitForStorage(t *testing.T) {
	im := newImage(16, 8<<16, 2)
	im.data(0, atData, 'a')
	im.compressed(1, (atData+1)<<16, deflated(t, words(1<<16, 1)))
	file := &stuckFile{Reader: bytes.NewReader(im.b), stuck: make(chan struct{}),
		back: make(chan struct{})}
	got := testtool.Must(Open(bg, near{file}, int64(len(im.b)), Options{}))(t)
	close(file.stuck)
	ask := func(off int64) (slow, below bool) {
		asked := make(chan struct{})
		go func() {
			slow, below = got.Decodes(off)
			close(asked)
		}()
		select {
		case <-asked:
		case <-time.After(time.Minute):
			close(file.back)
			<-asked
			t.Fatal("it waited")
		}
		return slow, below
	}
	for _, off := range []int64{0, 1 << 16, 2 << 16} {
		slow, below := ask(off)
		require.False(t, slow || below)
	}
	read := testtool.Go(func() error { return testtool.Err(got.ReadAt(bg, make([]byte, 512), 0)) })
	testtool.Eventually(t, func() bool { return file.asked.Load() == 1 })
	slow, below := ask(1 << 16)
	require.False(t, slow || below)

	close(file.back)
	require.NoError(t, <-read)
	for off, want := range map[int64][2]bool{0: {false, false}, 1 << 16: {true, false},
		2 << 16: {false, true}} {
		slow, below := ask(off)
		require.Equal(t, want, [2]bool{slow, below}, "%#x, with the table in memory", off)
	}
}

func decodes(im *Image, off int64) bool {
	slow, _ := im.Decodes(off)
	return slow
}

// TestShards puts many blocks into a cache of several shards: each is found where it was put, by
// any reader.
func TestShards(t *testing.T) {
	var c cache
	c.init(8, 64*8, func(_ context.Context, p []byte, at uint64) error {
		p[0] = byte(at)
		return nil
	})
	require.Len(t, c.shards, maxShards)
	for key := range int64(64) {
		require.False(t, c.has(1000+key, 1))
		testtool.Must(c.get(bg, 1000+key, uint64(key), 8))(t).release()
	}
	for key := range int64(64) {
		require.True(t, c.has(1000+key, 8))
		b, ok := c.peek(1000 + key)
		require.True(t, ok)
		require.EqualValues(t, key, b.data[0])
		b.release()
	}
	_, ok := c.peek(999)
	require.False(t, ok)
}
