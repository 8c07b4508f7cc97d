package qcow2_test

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// appendImage writes an image of clusters at the given numbers, in that order, and opens it.
func appendImage(t *testing.T, opt qcow2.AppendOptions, size int64, clusters map[int64][]byte,
	order []int64) (string, *qcow2.Image) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.qcow2")
	f := testtool.Must(os.Create(path))(t)
	t.Cleanup(func() { f.Close() })
	a := testtool.Must(qcow2.NewAppender(f, opt))(t)
	for _, n := range order {
		require.NoError(t, testtool.Err(a.WriteAt(clusters[n], n*int64(len(clusters[n])))))
	}
	length := testtool.Must(a.Finish(size))(t)
	require.Equal(t, testtool.Must(f.Stat())(t).Size(), length)
	im := testtool.Must(qcow2.Open(context.Background(), near{f}, length, qcow2.Options{}))(t)
	return path, im
}

func TestAppendedImage(t *testing.T) {
	for _, clusterSize := range []int64{0, 4 << 10, 16 << 10, 64 << 10} {
		size := max(clusterSize, 4<<10)
		r := rand.New(rand.NewPCG(uint64(clusterSize), 1))
		clusters := make(map[int64][]byte)
		want := make([]byte, 700*size)
		var order []int64
		for _, n := range r.Perm(700)[:500] {
			p := make([]byte, size)
			if n%7 != 0 { // the others are zeros
				for i := range p {
					p[i] = byte(r.Uint32())
				}
			}
			clusters[int64(n)] = p
			order = append(order, int64(n))
			copy(want[int64(n)*size:], p)
		}
		path, im := appendImage(t, qcow2.AppendOptions{ClusterSize: clusterSize}, 700*size,
			clusters, order)
		require.True(t, bytes.Equal(want, filetest.Read(t, im, 0, len(want))))
		dir := filepath.Dir(path)
		filetest.QemuImg(t, dir, "check", "-q", path)
		filetest.QemuImg(t, dir, "convert", "-O", "raw", path, "raw")
		require.True(t, bytes.Equal(want, filetest.Content(t, filepath.Join(dir, "raw"))))
	}
}

// TestAppendedImageHidesItsBackingFile has zeros above content.
func TestAppendedImageHidesItsBackingFile(t *testing.T) {
	full := bytes.Repeat([]byte("x"), 4<<10)
	base, _ := appendImage(t, qcow2.AppendOptions{}, 1<<20,
		map[int64][]byte{1: full, 2: full, 3: full}, []int64{3, 1, 2})
	path, im := appendImage(t, qcow2.AppendOptions{Backing: "base.qcow2"}, 2<<20,
		map[int64][]byte{2: make([]byte, 4<<10), 4: full, 300: full}, []int64{4, 2, 300})
	require.Equal(t, "base.qcow2", im.Info().BackingFile)
	require.Equal(t, "qcow2", im.Info().BackingFormat)
	dir := filepath.Dir(path)
	require.NoError(t, os.Rename(base, filepath.Join(dir, "base.qcow2")))
	filetest.QemuImg(t, dir, "check", "-q", path)
	filetest.QemuImg(t, dir, "convert", "-O", "raw", path, "raw")
	raw := filetest.Content(t, filepath.Join(dir, "raw"))
	want := make([]byte, 2<<20)
	for _, n := range []int{1, 3, 4, 300} {
		copy(want[n<<12:], full)
	}
	require.True(t, bytes.Equal(want, raw))
}

// TestSmallAppendedImage pins the size of a small difference of a large disk.
func TestSmallAppendedImage(t *testing.T) {
	full := bytes.Repeat([]byte("x"), 4<<10)
	path, _ := appendImage(t, qcow2.AppendOptions{}, 8<<30, map[int64][]byte{0: full}, []int64{0})
	info := testtool.Must(os.Stat(path))(t)
	// header, cluster, L2 table, L1 table of 4096 entries, refcounts and their table
	require.Equal(t, int64(4<<10*(1+1+1+8+2)), info.Size())
}

func TestAppendingIsRefused(t *testing.T) {
	_, err := qcow2.NewAppender(nil, qcow2.AppendOptions{ClusterSize: 5000})
	require.ErrorContains(t, err, "a power of two from 4 KiB to 64 KiB works")
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "image")))(t)
	defer f.Close()
	full := bytes.Repeat([]byte("x"), 4<<10)
	for _, c := range []struct {
		message string
		do      func(a *qcow2.Appender) error
	}{
		{"are not whole clusters", func(a *qcow2.Appender) error {
			_, err := a.WriteAt(full, 512)
			return err
		}},
		{"written twice", func(a *qcow2.Appender) error {
			require.NoError(t, testtool.Err(a.WriteAt(append(full, full...), 4<<10)))
			require.NoError(t, testtool.Err(a.WriteAt(full, 8<<10)))
			_, err := a.Finish(1 << 20)
			return err
		}},
		{"past the size", func(a *qcow2.Appender) error {
			require.NoError(t, testtool.Err(a.WriteAt(full, 1<<20)))
			_, err := a.Finish(1 << 20)
			return err
		}},
		{"cannot be stored", func(a *qcow2.Appender) error {
			_, err := a.Finish(100)
			return err
		}},
	} {
		a := testtool.Must(qcow2.NewAppender(f, qcow2.AppendOptions{}))(t)
		require.ErrorContains(t, c.do(a), c.message)
	}
}

// failingFile fails when a byte past a limit is written.
type failingFile struct {
	limit int64
	head  bool // the header was written
}

func (f *failingFile) WriteAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > f.limit {
		return 0, io.ErrShortWrite
	}
	f.head = f.head || off == 0
	return len(p), nil
}

// TestAppendingToAFullDisk: wherever the room ends, in the clusters or in the tables behind them,
// there is no header.
func TestAppendingToAFullDisk(t *testing.T) {
	full := bytes.Repeat([]byte("x"), 1<<20)
	finish := func(f *failingFile) (int64, error) {
		a := testtool.Must(qcow2.NewAppender(f, qcow2.AppendOptions{}))(t)
		for i := range int64(3) {
			_, _ = a.WriteAt(full, i<<20)
		}
		return a.Finish(1 << 40) // the L1 table is longer than what is written at once
	}
	f := &failingFile{limit: 1 << 30}
	length := testtool.Must(finish(f))(t)
	require.True(t, f.head)
	require.Greater(t, length, int64(7<<20))
	for _, limit := range []int64{1 << 12, 2 << 20, 3<<20 + 1<<12, 5 << 20, length - 1} {
		f := &failingFile{limit: limit}
		require.ErrorIs(t, testtool.Err(finish(f)), io.ErrShortWrite, "%d", limit)
		require.False(t, f.head)
	}
}
