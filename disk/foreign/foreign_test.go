package foreign

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

var bg = context.Background()

// sparse is a file in memory: parts of it, and zeros.
type sparse struct {
	size  int64
	parts map[int64][]byte
}

func (s *sparse) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	n := max(min(int64(len(p)), s.size-off), 0)
	p = p[:n]
	clear(p)
	for at, part := range s.parts {
		if at < off+n && off < at+int64(len(part)) {
			copy(p[max(at-off, 0):], part[max(off-at, 0):])
		}
	}
	if n == 0 {
		return 0, io.EOF
	}
	return int(n), nil
}

// onDisk is a file as a Reader.
type onDisk struct{ *os.File }

func (f onDisk) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return f.File.ReadAt(p, off)
}

func openFile(t *testing.T, format Format, path string) *Image {
	f := testtool.Must(os.Open(path))(t)
	t.Cleanup(func() { f.Close() })
	info := testtool.Must(f.Stat())(t)
	return testtool.Must(Open(bg, format, onDisk{f}, info.Size(), Options{}))(t, path)
}

func content(t *testing.T, im *Image) []byte {
	p := make([]byte, im.Size())
	require.Len(t, p, testtool.Must(im.ReadAt(bg, p, 0))(t))
	return p
}

// TestLikeQEMU reads what qemu-img writes, and compares every byte.
func TestLikeQEMU(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-io")
	for _, c := range []struct {
		format  Format
		qemu    string // its name for the format
		options string
		size    int64
	}{
		{VHDX, "vhdx", "subformat=dynamic", 20<<20 + 512},
		{VHDX, "vhdx", "subformat=dynamic,block_size=1M", 7<<20 + 1536},
		{VHDX, "vhdx", "subformat=dynamic,block_size=1M,block_state_zero=off", 5 << 20},
		{VHDX, "vhdx", "subformat=dynamic,block_size=256M", 1<<20 + 512},
		{VHDX, "vhdx", "subformat=fixed", 9<<20 + 512},
		{VHD, "vpc", "subformat=dynamic", 5<<20 + 512},
		{VHD, "vpc", "subformat=dynamic,force_size=on", 7<<20 + 512},
		{VHD, "vpc", "subformat=fixed,force_size=on", 7<<20 + 512},
		{VDI, "vdi", "static=off", 5<<20 + 512},
		{VDI, "vdi", "static=on", 3 << 20},
		{VMDK, "vmdk", "subformat=monolithicSparse", 33<<20 + 512},
		{VMDK, "vmdk", "subformat=monolithicSparse,compat6=on", 5 << 20},
		{VMDK, "vmdk", "subformat=monolithicSparse,zeroed_grain=on", 5 << 20},
	} {
		t.Run(c.qemu+" "+c.options, func(t *testing.T) {
			dir := t.TempDir()
			disk := make([]byte, c.size)
			random := rand.NewChaCha8([32]byte{1})
			_, _ = random.Read(disk[:300<<10])
			_, _ = random.Read(disk[c.size/2&^511:][:3000])
			_, _ = random.Read(disk[c.size-700:])
			require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), disk, 0o600))
			filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", c.qemu, "-o", c.options, "raw",
				"image")
			compare(t, dir, c.format, c.qemu, disk)
			// Blocks that are written backwards lie backwards.
			filetest.QemuImg(t, dir, "create", "-f", c.qemu, "-o", c.options, "image", "6M")
			out, err := exec.CommandContext(t.Context(), "qemu-io", "-f", c.qemu, "-c",
				"write -P 1 5M 700", "-c", "write -P 2 4194000 700", "-c", "write -P 3 1M 1M",
				"-c", "write -P 4 0 1", "-c",
				"write -z 2M 128k", filepath.Join(dir, "image")).CombinedOutput()
			require.NoError(t, err, "%s", out)
			compare(t, dir, c.format, c.qemu, nil)
		})
	}
}

// compare compares an image with what qemu-img makes of it, and with how it begins.
func compare(t *testing.T, dir string, format Format, qemu string, begins []byte) {
	filetest.QemuImg(t, dir, "convert", "-f", qemu, "-O", "raw", "image", "want")
	want := filetest.Content(t, filepath.Join(dir, "want"))
	im := openFile(t, format, filepath.Join(dir, "image"))
	got := content(t, im)
	require.True(t, bytes.Equal(want, got))
	require.True(t, bytes.HasPrefix(got, begins))
	stored := int64(0)
	for off := int64(0); off < im.Size(); {
		at, n := testtool.Must2(im.Run(bg, off, im.Size()-off))(t)
		if at >= 0 {
			stored += n
		} else {
			require.Empty(t, bytes.Trim(got[off:off+n], "\x00"), "a run without a place is zeros")
		}
		off += n
	}
	require.Equal(t, stored, im.Stored())
	random := rand.New(rand.NewPCG(1, 2))
	for range 40 {
		off := random.Int64N(im.Size())
		p := make([]byte, random.IntN(3<<20))
		n, err := im.ReadAt(bg, p, off)
		if err != io.EOF {
			require.NoError(t, err)
		}
		require.True(t, bytes.Equal(p[:n], got[off:min(off+int64(len(p)), im.Size())]))
	}
}

// refused opens an image that must be refused, with little memory.
func refused(t *testing.T, name string, format Format, s *sparse, want string) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := Open(bg, format, s, s.size, Options{})
	runtime.ReadMemStats(&after)
	own := new(Error)
	require.ErrorAs(t, err, &own, name)
	require.ErrorContains(t, err, want, name)
	require.NotEmpty(t, own.Action, name)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(66<<20), name)
}

// readSome reads an image as far as a fuzzer has time for.
func readSome(t *testing.T, im *Image) {
	p := make([]byte, 64<<10)
	for off := int64(0); off < im.Size() && off < 8<<20; {
		at, n, err := im.Run(bg, off, im.Size()-off)
		if err != nil || n <= 0 || off+n > im.Size() || at >= 0 && at+n > im.file.size {
			t.Fatalf("a run at %d: %d bytes at %d, %v", off, n, at, err)
		}
		if _, err := im.ReadAt(bg, p[:min(n, int64(len(p)))], off); err != nil {
			t.Fatal(err)
		}
		off += n
	}
}
