package qcow2

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

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
