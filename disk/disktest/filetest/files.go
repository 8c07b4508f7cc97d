package filetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
)

// QemuImg runs qemu-img in a directory.
func QemuImg(t testing.TB, dir string, args ...string) {
	t.Helper()
	path, err := exec.LookPath("qemu-img")
	testtool.Needs(t, "qemu-img", err == nil)
	cmd := exec.Command(path, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "qemu-img %v: %s", args, out)
}

// PowerCut mounts a file system. cut makes it lose what is not on storage, as a power cut does.
// With names, the file system has brought them there by itself, but no content.
func PowerCut(t *testing.T) (dir string, cut func(names bool)) {
	t.Helper()
	_, err := exec.LookPath("mkfs.ext4")
	testtool.Needs(t, "mkfs.ext4, and root to mount it", err == nil && os.Geteuid() == 0)
	dir = t.TempDir()
	device := filepath.Join(t.TempDir(), "device")
	require.NoError(t, os.WriteFile(device, nil, 0o600))
	require.NoError(t, os.Truncate(device, 32<<20))
	run := func(command ...string) {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		require.NoError(t, err, "%v: %s", command, out)
	}
	mount := func() { run("mount", "-o", "loop,noauto_da_alloc,commit=300", device, dir) }
	run("mkfs.ext4", "-q", device)
	mount()
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir, func(names bool) {
		root := testtool.Must(os.Open(dir))(t)
		const shutdown, withLog, withoutLog = 0x8004587d, 1, 2 // EXT4_IOC_SHUTDOWN
		how := withoutLog
		if names {
			how = withLog
		}
		require.NoError(t, unix.IoctlSetPointerInt(int(root.Fd()), shutdown, how))
		require.NoError(t, root.Close())
		run("umount", dir)
		mount()
	}
}

// TinyFS mounts a small file system, of a size such as "256k".
func TinyFS(t *testing.T, size string) string {
	t.Helper()
	testtool.Needs(t, "root (to mount a small file system)", os.Geteuid() == 0)
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size)
	testtool.Needs(t, "root with CAP_SYS_ADMIN (to mount a small file system)", err == nil)
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// Put writes a file into the directory. If size is larger than the content, the rest is a hole.
func Put(t testing.TB, dir, name string, content []byte, size int64) string {
	t.Helper()
	path := filepath.Join(dir, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, content, 0o644))
	if size > int64(len(content)) {
		require.NoError(t, os.Truncate(path, size))
	}
	return path
}

// Block returns n bytes b.
func Block(b byte, n int) []byte {
	return bytes.Repeat([]byte{b}, n)
}

// Allocated returns how many bytes a file takes on its file system.
func Allocated(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	return st.Blocks * 512
}

// Sample returns content with runs of data, zeros and text of all lengths. The same seed gives the
// same content.
func Sample(size int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 0))
	p := make([]byte, size)
	for off := 0; off < size; {
		n := min(size-off, 512*(1+r.IntN(1<<r.IntN(12))))
		run := p[off : off+n]
		switch r.IntN(3) {
		case 0:
			noise(r, run)
		case 1:
			for done := copy(run, "kubevirt"); done < n; done *= 2 {
				copy(run[done:], run[:done])
			}
		}
		off += n
	}
	return p
}

// ReadAll reads an image or a disk in pieces of an odd size.
func ReadAll(t *testing.T, r interface {
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
}, size int64,
) []byte {
	t.Helper()
	const piece = 300_007 // bytes
	content := make([]byte, size)
	for off := int64(0); off < size; {
		n, err := r.ReadAt(context.Background(), content[off:min(off+piece, size)], off)
		require.False(t, n == 0 || err != nil && err != io.EOF, "%d bytes at %d: %v", n, off, err)
		off += int64(n)
	}
	return content
}

// Read reads a part of a disk, all of which must be there.
func Read[N int | int64](t testing.TB, r interface {
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
}, off int64, length N) []byte {
	t.Helper()
	p := make([]byte, length)
	require.NoError(t, testtool.Err(r.ReadAt(t.Context(), p, off)))
	return p
}

// Write writes to a disk, which must take it.
func Write(t testing.TB, w interface {
	WriteAt(ctx context.Context, p []byte, off int64) (int, error)
}, p []byte, off int64) {
	t.Helper()
	require.NoError(t, testtool.Err(w.WriteAt(t.Context(), p, off)))
}

// Content is what a file has.
func Content(t testing.TB, path string) []byte {
	t.Helper()
	p := testtool.Must(os.ReadFile(path))(t)
	return p
}

// Empty requires a directory without files.
func Empty(t testing.TB, dir string) {
	t.Helper()
	entries := testtool.Must(os.ReadDir(dir))(t)
	require.Empty(t, entries)
}

// noise fills p, which nobody else has yet. The race detector would look at each byte.
//
//go:norace
func noise(r *rand.Rand, p []byte) {
	for i := range p {
		p[i] = byte(r.Uint32())
	}
}

// Clone copies the content of a disk. The race detector would look at each byte.
//
//go:norace
func Clone(p []byte) []byte {
	c := make([]byte, len(p))
	copy(c, p)
	return c
}

// FirstDifference is where two disks of one size differ first, in bytes, or -1. The race detector
// would look at each byte.
//
//go:norace
func FirstDifference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := 0; i < len(a); i += disk.SectorSize {
		if !bytes.Equal(a[i:i+disk.SectorSize], b[i:i+disk.SectorSize]) {
			return i
		}
	}
	return -1
}

// Fill fills a file system. more fills what has become free since, and free gives all space back.
func Fill(t *testing.T, dir string) (more, free func()) {
	t.Helper()
	filler := testtool.Must(os.Create(filepath.Join(dir, "filler")))(t)
	t.Cleanup(func() { filler.Close() })
	more = func() {
		for size := 1 << 20; size > 0; {
			if _, err := filler.Write(make([]byte, size)); err != nil {
				require.True(t, errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT), "%v",
					err)
				size /= 2
			}
		}
	}
	more()
	return more,
		func() { require.NoError(t, errors.Join(filler.Close(), os.Remove(filler.Name()))) }
}

// Names returns the names of the files in a directory, in order.
func Names(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries := testtool.Must(os.ReadDir(dir))(t)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Sparse makes and opens a file that is one hole.
func Sparse(t *testing.T, size int64) *os.File {
	t.Helper()
	f := testtool.Must(os.OpenFile(Put(t, t.TempDir(), "disk.raw", nil, size), os.O_RDWR, 0))(t)
	t.Cleanup(func() { f.Close() })
	return f
}

// OverlayOn makes a qcow2 image on a backing file. qemu-img does not look at the backing file.
func OverlayOn(t testing.TB, dir, name, backing, format string) {
	t.Helper()
	args := []string{"create", "-q", "-u", "-f", "qcow2", "-b", backing}
	if format != "" {
		args = append(args, "-F", format)
	} else {
		// qemu-img refuses to make an image without the format, so the code below overwrites it.
		args = append(args, "-F", "raw")
	}
	QemuImg(t, dir, append(args, name, "1M")...)
	if format != "" {
		return
	}
	file := filepath.Join(dir, name)
	content := testtool.Must(os.ReadFile(file))(t)
	at := bytes.Index(content, []byte("\xe2\x79\x2a\xca\x00\x00\x00\x03raw"))
	require.Positive(t, at, "the header extension with the format")
	copy(content[at:], "\x12\x34\x56\x78") // an extension that nobody knows
	require.NoError(t, os.WriteFile(file, content, 0o644))
}

// QemuIO runs commands of qemu-io on a qcow2 image.
func QemuIO(t testing.TB, dir, name string, commands ...string) {
	t.Helper()
	path, err := exec.LookPath("qemu-io")
	testtool.Needs(t, "qemu-io", err == nil)
	args := []string{"-f", "qcow2"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	cmd := exec.Command(path, append(args, name)...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "qemu-io %v: %s", args, out)
}
