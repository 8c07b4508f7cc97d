package qcow2_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// fullFile takes some bytes, and then is full.
type fullFile struct {
	memoryFile
	left int64
	err  error // nil: it does not even say so
}

func (f *fullFile) WriteAt(p []byte, off int64) (int, error) {
	n := min(int64(len(p)), f.left)
	f.left -= n
	if n < int64(len(p)) {
		_, _ = f.memoryFile.WriteAt(p[:n], off)
		return int(n), f.err
	}
	return f.memoryFile.WriteAt(p, off)
}

// TestWriteToFullStorage ends the storage at every byte. The error is returned, and what was
// written cannot be opened as an image.
func TestWriteToFullStorage(t *testing.T) {
	defer goleak.VerifyNone(t)
	full := errors.New("it is full")
	r := rand.New(rand.NewPCG(17, 4))
	d := &memoryDisk{size: 34 << 10, runs: []run{
		{512, content(r, 1500)}, {33 << 10, content(r, 512)}}}
	opt := qcow2.WriteOptions{Compression: qcow2.CompressionNone, Workers: 1}.WithClusterBits(9)
	size := int64(len(write(t, d, opt)))
	for left := range size {
		for _, want := range []error{full, nil} {
			if want == nil && left%16 != 0 {
				continue
			}
			f := &fullFile{left: left, err: want}
			_, err := qcow2.Write(t.Context(), f, d, opt)
			if want == nil {
				want = io.ErrShortWrite
			}
			require.ErrorIs(t, err, want, "after %d bytes of %d", left, size)
			_, err = openBytes(t, f.b)
			if left < size-512 { // of the header
				require.Error(t, err, "after %d bytes of %d", left, size)
			}
		}
	}
	_, err := qcow2.Write(t.Context(), &fullFile{left: size, err: full}, d, opt)
	require.NoError(t, err)
}

// In the middle of a large image, with all workers busy.
func TestWriteToFullStorageInTheMiddle(t *testing.T) {
	defer goleak.VerifyNone(t)
	full := errors.New("it is full")
	d := shapes()["everything"]
	for _, c := range compressions {
		for _, left := range []int64{0, 1 << 20, 2 << 20} {
			_, err := qcow2.Write(t.Context(), &fullFile{left: left, err: full}, d,
				qcow2.WriteOptions{Compression: c, Workers: 3})
			require.ErrorIs(t, err, full, "%s, after %d bytes", c, left)
		}
	}
}

// faultyDisk is a disk that hooks into what is read of it.
type faultyDisk struct {
	*memoryDisk
	hook func(off, end int64) error // before a read
	data func() error               // after all runs
}

func (d *faultyDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if d.hook != nil {
		if err := d.hook(off, off+int64(len(p))); err != nil {
			return 0, err
		}
	}
	return d.memoryDisk.ReadAt(ctx, p, off)
}

func (d *faultyDisk) Data(ctx context.Context, f func(off, n int64) error) error {
	err := d.memoryDisk.Data(ctx, f)
	if err == nil && d.data != nil {
		err = d.data()
	}
	return err
}

func TestWriteOfWhatCannotBeRead(t *testing.T) {
	defer goleak.VerifyNone(t)
	d := shapes()["everything"]
	lost := errors.New("it is lost")
	for bad := int64(0); bad < d.size; bad += 555_555 {
		src := &faultyDisk{memoryDisk: d, hook: func(off, end int64) error {
			if off <= bad && bad < end {
				return lost
			}
			return nil
		}}
		_, err := qcow2.Write(t.Context(), new(memoryFile), src, qcow2.WriteOptions{Workers: 2})
		require.ErrorIs(t, err, lost, "byte %d", bad)
	}

	for pass := range 2 { // the first looks for tables
		calls := 0
		src := &faultyDisk{memoryDisk: d, data: func() error {
			if calls++; calls > pass {
				return lost
			}
			return nil
		}}
		_, err := qcow2.Write(t.Context(), new(memoryFile), src, qcow2.WriteOptions{})
		require.ErrorIs(t, err, lost)
	}

	short := &memoryDisk{size: d.size, runs: d.runs}
	var reads atomic.Int64
	src := &faultyDisk{memoryDisk: short, hook: func(int64, int64) error {
		if reads.Add(1) == 5 {
			return io.EOF
		}
		return nil
	}}
	_, err := qcow2.Write(t.Context(), new(memoryFile), src, qcow2.WriteOptions{})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF, "the disk became shorter")
}

// A disk that changes while it is stored makes an image that is valid, whatever is in it.
func TestWriteOfWhatChanges(t *testing.T) {
	d := shapes()["everything"]
	for _, c := range compressions {
		var reads atomic.Int64
		src := &changingDisk{memoryDisk: d, zero: func() bool { return reads.Add(1) > 1 }}
		image := write(t, src, qcow2.WriteOptions{Compression: c})
		require.NoError(t, testtool.Err(openBytes(t, image)))
		reads.Store(-20)
		image = write(t, src, qcow2.WriteOptions{Compression: c})
		require.NoError(t, testtool.Err(openBytes(t, image)))
	}
}

type changingDisk struct {
	*memoryDisk
	zero func() bool
}

func (d *changingDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n, err := d.memoryDisk.ReadAt(ctx, p, off)
	if d.zero() {
		clear(p)
	}
	return n, err
}

func TestWriteCancelled(t *testing.T) {
	defer goleak.VerifyNone(t)
	d := shapes()["everything"]
	total := int64(0)
	count := func(int64, int64) error { total++; return nil }
	write(t, &faultyDisk{memoryDisk: d, hook: count}, qcow2.WriteOptions{Workers: 1})
	require.Greater(t, total, int64(20))
	for after := int64(1); after < total-8; after += 2 {
		ctx, cancel := context.WithCancel(t.Context())
		var reads atomic.Int64
		cancelled := make(chan struct{})
		src := &faultyDisk{memoryDisk: d, hook: func(int64, int64) error {
			switch n := reads.Add(1); {
			case n == after:
				cancel()
				close(cancelled)
			case n > after:
				<-cancelled // which may come a while later on a busy machine
			}
			return nil
		}}
		f := new(memoryFile)
		_, err := qcow2.Write(ctx, f, src, qcow2.WriteOptions{Workers: 3})
		require.ErrorIs(t, err, context.Canceled)
		require.LessOrEqual(t, reads.Load(), after+3, "each worker may have begun one more")
		require.False(t, qcow2.IsQcow2(f.b))
		cancel()
	}
	for begun := range int64(3) { // the first reads look for tables
		ctx, cancel := context.WithCancel(t.Context())
		var reads atomic.Int64
		src := &faultyDisk{memoryDisk: d, hook: func(int64, int64) error {
			if reads.Add(1) > begun {
				cancel()
				<-ctx.Done()
				return errors.New("not now")
			}
			return nil
		}}
		_, err := qcow2.Write(ctx, new(memoryFile), src, qcow2.WriteOptions{Workers: 2})
		require.ErrorIs(t, err, context.Canceled)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, d := range shapes() {
		_, err := qcow2.Write(ctx, new(memoryFile), d, qcow2.WriteOptions{})
		require.ErrorIs(t, err, context.Canceled)
	}
}

func TestWriteRefuses(t *testing.T) {
	for _, size := range []int64{-512, 0, 511, 513, 1<<51 + 512} {
		d := &memoryDisk{size: size}
		_, err := qcow2.Write(t.Context(), new(memoryFile), d, qcow2.WriteOptions{})
		require.ErrorContains(t, err, "is not stored as qcow2", "%d bytes", size)
	}
	_, err := qcow2.Write(t.Context(), new(memoryFile), &memoryDisk{size: 512},
		qcow2.WriteOptions{Compression: "lz4"})
	require.EqualError(t, err, `compression "lz4" is unknown: use zstd, zlib or none`)
}
