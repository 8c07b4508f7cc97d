package image

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// A disk that is one hole is written as zeros, so that its reader sees its size.
func TestStreamWritesHoles(t *testing.T) {
	img := openImage(t, filetest.Put(t, t.TempDir(), "disk.raw", nil, 5<<20))
	var out bytes.Buffer
	require.NoError(t, Stream(t.Context(), img, &out, nil))
	require.True(t, bytes.Equal(make([]byte, 5<<20), out.Bytes()))
}

type streamWriter func(p []byte) (int, error)

func (f streamWriter) Write(p []byte) (int, error) { return f(p) }

func TestStreamThatFails(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block(1, 40<<20), 0)
	img := openImage(t, path)
	full := errors.New("it is full")
	require.ErrorIs(t, Stream(t.Context(), img,
		streamWriter(func([]byte) (int, error) { return 0, full }), nil), full)

	p, written := new(Progress), int64(0)
	require.NoError(t, Stream(t.Context(), img, streamWriter(func(b []byte) (int, error) {
		done, total := p.Data()
		require.Equal(t, []int64{written, 40 << 20}, []int64{done, total}, "all of it is data")
		written += int64(len(b))
		return len(b), nil
	}), p))

	ctx, cancel := context.WithCancel(t.Context())
	err := Stream(ctx, img, streamWriter(func(p []byte) (int, error) {
		cancel()
		return len(p),
			nil
	}), nil)
	require.ErrorIs(t, err, context.Canceled)

	require.NoError(t, os.Truncate(path, 20<<20))
	require.Error(t, Stream(t.Context(), img,
		streamWriter(func(p []byte) (int, error) { return len(p), nil }), p))
	require.False(t, p.Finished())
}
