package image

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// fillWith appends data in pieces of the given size.
func fillWith(t *testing.T, f *Filling, data []byte, piece int) {
	t.Helper()
	for len(data) > 0 {
		p := testtool.Must(f.Next(context.Background()))(t)
		n := copy(p[:min(len(p), piece)], data)
		f.Put(p[:n])
		data = data[n:]
	}
}

// TestFilling: a file is filled in several goes, with pieces of any size, and its zeros are holes.
func TestFilling(t *testing.T) {
	data := make([]byte, 9<<20+100)
	random := rand.NewChaCha8([32]byte{})
	for off := 0; off < len(data); off += 3 << 20 {
		_, _ = random.Read(data[off:min(off+1<<20, len(data))])
	}
	for _, piece := range []int{fillPiece, 1<<20 - 1, 70_000, 4096} {
		for _, cut := range []int{0, 1, 4096, 1<<20 + 1, 5 << 20, len(data)} {
			path := filepath.Join(t.TempDir(), "file")
			f := testtool.Must(OpenFilling(path, 0))(t)
			fillWith(t, f, data[:cut], piece)
			require.NoError(t, f.Drain())
			require.NoError(t, f.Sync())
			require.EqualValues(t, cut, f.Size())
			// This is lost: it was not asked for.
			fillWith(t, f, bytes.Repeat([]byte{0xee}, 2<<20), piece)
			require.NoError(t, f.Close())

			f = testtool.Must(OpenFilling(path, int64(cut)))(t)
			require.NoError(t, f.Expect(int64(len(data))))
			fillWith(t, f, data[cut:], piece)
			require.NoError(t, f.Finish(12<<20))
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.File().Fd()), &st))
			require.Less(t, st.Blocks*512, int64(6<<20), "zeros must be holes")
			require.NoError(t, f.Close())
			got := testtool.Must(os.ReadFile(path))(t)
			want := append(bytes.Clone(data), make([]byte, 12<<20-len(data))...)
			require.True(t, bytes.Equal(want, got), "%d bytes, cut at %d", piece, cut)
		}
	}
}

func TestFillingRefuses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(path, make([]byte, 100), 0o600))
	require.ErrorContains(t, testtool.Err(OpenFilling(path, 101)), "has 100 bytes")
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(path, link))
	require.Error(t, testtool.Err(OpenFilling(link, 0)))
	f := testtool.Must(OpenFilling(path, 0))(t)
	defer f.Close()
	full := new(SpaceError)
	require.ErrorAs(t, f.Expect(1<<62), &full)
}

// TestFillingFails: an error of storage comes back from Next, and stays.
func TestFillingFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	f := testtool.Must(OpenFilling(path, 0))(t)
	t.Cleanup(func() { _ = f.Close() }) // its error is that the file is closed
	require.NoError(t, f.to.file.Close())
	p := testtool.Must(f.Next(context.Background()))(t)
	p[0] = 1
	f.Put(p)
	failed := f.Drain()
	require.Error(t, failed)
	// There are buffers too, and none is handed out, however often Next is called.
	for range 100 {
		require.ErrorIs(t, testtool.Err(f.Next(context.Background())), failed)
	}
	require.Error(t, f.Sync())
}

// TestFillingStopped: Next hands out nothing once its context is done.
func TestFillingStopped(t *testing.T) {
	f := testtool.Must(OpenFilling(filepath.Join(t.TempDir(), "file"), 0))(t)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 100 {
		require.ErrorIs(t, testtool.Err(f.Next(ctx)), context.Canceled)
	}
}

// TestCheckHead: an image is refused by its beginning where that is enough.
func TestCheckHead(t *testing.T) {
	content := make([]byte, 1<<20)
	copy(content, "QFI\xfb")
	_, err := CheckHead("x", content, -1, Options{})
	refused := new(Error)
	require.ErrorAs(t, err, &refused)
	require.Equal(t, FormatQcow2, refused.Format)
}

// TestDeviceBehindABackingFile: a disk that is longer than its backing file ends with zeros, also
// on a device that had something else there.
func TestDeviceBehindABackingFile(t *testing.T) {
	dir, ctx := t.TempDir(), t.Context()
	want := append(filetest.Block('b', 1<<20), make([]byte, 3<<20)...)
	filetest.Put(t, dir, "base.raw", want[:1<<20], 1<<20)
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw",
		"top.qcow2", "4M")
	path := filetest.Put(t, dir, "device", filetest.Block('x', 8<<20), 8<<20)
	device := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
	to := &Destination{file: device, name: path, device: 8 << 20}
	arrive := func(name string, below *Arrival) *Arrival {
		file := filetest.Content(t, filepath.Join(dir, name))
		a := NewArrival(name, int64(len(file)), to, ArrivalOptions{Below: below})
		for !a.Done() {
			require.NoError(t, a.Pass(ctx, bytes.NewReader(file)))
		}
		return a
	}
	arrive("top.qcow2", arrive("base.raw", nil))
	require.NoError(t, device.Close())
	got := filetest.Content(t, path)
	require.True(t, bytes.Equal(want, got[:len(want)]))
	require.Equal(t, byte('x'), got[len(want)])
}
