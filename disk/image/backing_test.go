package image

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

func TestBackingFilesThatAreRefused(t *testing.T) {
	outside := t.TempDir()
	secret := filetest.Put(t, outside, "secret.raw", []byte("secret"), 1<<20)
	for _, c := range []struct{ name, backing, format, reason string }{
		{"absolute path", secret, "raw", "absolute"},
		{"the password file", "/etc/passwd", "raw", "absolute"},
		{"parent directory", "../" + filepath.Base(outside) + "/secret.raw", "raw", ".."},
		{"parent directory further down", "sub/../../x.raw", "raw", ".."},
		{"json description",
			`json:{"driver":"raw","file":{"driver":"file","filename":"/etc/passwd"}}`, "raw",
			"json:"},
		{"nbd", "nbd://127.0.0.1/x", "raw", `protocol "nbd"`},
		{"nbd short", "nbd:127.0.0.1:10809", "raw", `protocol "nbd"`},
		{"https", "https://example.org/base.raw", "raw", `protocol "https"`},
		{"file protocol", "file:base.raw", "raw", `protocol "file"`},
		{"fat", "fat:/etc", "raw", `protocol "fat"`},
		{"missing", "missing.raw", "raw", "does not exist"},
		{"link out of the directory", "link-out", "raw", "symbolic link"},
		{"link inside of the directory", "link-in", "raw", "symbolic link"},
		{"through a linked directory", "link-dir/secret.raw", "raw", "symbolic link"},
		{"fifo", "fifo", "raw", "FIFO"},
		{"device", "null", "raw", "character device"},
		{"directory", "sub", "raw", "directory"},
		{"directory itself", ".", "raw", "directory"},
		{"no format", "base.raw", "", "does not name the format"},
		{"format that is not supported", "base.vmdk", "vmdk", `"vmdk"`},
		{"raw that is a VMDK", "base.vmdk", "raw", "VMDK"},
		{"qcow2 that is raw", "base.raw", "qcow2", "its content is raw"},
		{"raw that is qcow2", "base.qcow2", "raw", "its content is qcow2"},
		{"itself", "./top.qcow2", "qcow2", "loop"},
		{"damaged", "damaged.qcow2", "qcow2", `backing file "damaged.qcow2", which is not valid`},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			filetest.Put(t, dir, "base.raw", []byte("base"), 1<<20)
			filetest.Put(t, dir, "base.vmdk", []byte("KDMV"), 1<<20)
			filetest.Put(t, dir, "sub/x.raw", []byte("x"), 512)
			filetest.Put(t, dir, "damaged.qcow2", []byte("QFI\xfb\x00\x00\x00\x09"), 1024)
			filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "base.qcow2", "1M")
			require.NoError(t, os.Symlink(secret, filepath.Join(dir, "link-out")))
			require.NoError(t, os.Symlink("base.raw", filepath.Join(dir, "link-in")))
			require.NoError(t, os.Symlink(outside, filepath.Join(dir, "link-dir")))
			require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644))
			if err := unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666,
				int(unix.Mkdev(1, 3))); err != nil && c.backing == "null" {
				testtool.Needs(t, "root (to make a device)", false)
			}
			filetest.OverlayOn(t, dir, "top.qcow2", c.backing, c.format)
			_, err := Open(filepath.Join(dir, "top.qcow2"), Options{})
			var bad *Error
			require.ErrorAs(t, err, &bad)
			require.Equal(t, "top.qcow2", bad.Name)
			require.Contains(t, bad.Reason, c.reason)
			require.NotEmpty(t, bad.Action)

			info, err := Inspect(filepath.Join(dir, "top.qcow2"), Options{})
			require.NoError(t, err, "it can be read, only not served")
			require.False(t, info.Servable)
			require.Equal(t, FormatQcow2, info.Format)
			require.Contains(t, info.Reason, c.reason)
		})
	}
}

func TestBackingChainDepthAndContent(t *testing.T) {
	dir := t.TempDir()
	// no extension: the overlay names its format
	filetest.Put(t, dir, "0", filetest.Block('0', 4096), 1<<20)
	format := "raw"
	for i := 1; i <= maxBackingDepth+1; i++ {
		filetest.OverlayOn(t, dir, fmt.Sprintf("%d.qcow2", i),
			strings.TrimSuffix(fmt.Sprintf("%d.qcow2", i-1),
				map[bool]string{true: ".qcow2"}[i == 1]), format)
		format = "qcow2"
	}
	_, err := Open(filepath.Join(dir, fmt.Sprintf("%d.qcow2", maxBackingDepth+1)), Options{})
	require.ErrorContains(t, err, fmt.Sprintf("more than %d backing files", maxBackingDepth))

	img := openImage(t, filepath.Join(dir, fmt.Sprintf("%d.qcow2", maxBackingDepth)))
	require.Len(t, img.Info().BackingChain, maxBackingDepth)
	require.Equal(t, BackingInfo{Name: "0", Format: FormatRaw, FormatSource: SourceContent,
		VirtualSize: 1 << 20, FileSize: 1 << 20},
		img.Info().BackingChain[maxBackingDepth-1])
	p := filetest.Read(t, img, 0, 8192)
	require.Equal(t, append(filetest.Block('0', 4096), make([]byte, 4096)...), p)
	require.Less(t, img.Info().AllocatedSize, int64(1<<20),
		"holes of the raw backing file are holes")

	top := fmt.Sprintf("%d.qcow2", maxBackingDepth)
	require.NoError(t, os.Remove(filepath.Join(dir, fmt.Sprintf("%d.qcow2", maxBackingDepth+1))))
	images := testtool.Must(ScanDir(dir, Options{}))(t)
	require.Equal(t, []string{top}, names(images), "backing files are no LUNs")
}

func TestBackingLoopIsListedForEveryFileOfIt(t *testing.T) {
	dir := t.TempDir()
	filetest.OverlayOn(t, dir, "a.qcow2", "b.qcow2", "qcow2")
	filetest.OverlayOn(t, dir, "b.qcow2", "c.qcow2", "qcow2")
	filetest.OverlayOn(t, dir, "c.qcow2", "a.qcow2", "qcow2")
	require.NoError(t, os.Link(filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "d.qcow2")))
	reasons := scanErrors(t, dir)
	require.Len(t, reasons, 4)
	for name, reason := range reasons {
		require.Contains(t, reason, "loop", name)
	}
}

func TestBackingFilesInSubdirectories(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "base/deep/root", filetest.Block('r', 4096), 1<<20)
	// relative to the file that names it
	filetest.OverlayOn(t, dir, "base/mid.qcow2", "deep/root", "raw")
	filetest.OverlayOn(t, dir, "top.qcow2", "./base/mid.qcow2", "qcow2")
	images := testtool.Must(ScanDir(dir, Options{}))(t)
	require.Len(t, images, 1)
	require.Equal(t, filetest.Block('r', 4096), filetest.Read(t, images[0], 0, 4096))
	names(images)
}

// A backing file of another size, as in QEMU: behind a shorter one there are zeros, a longer one is
// cut off, and a last partial sector is filled up.
func TestBackingFilesOfAnotherSize(t *testing.T) {
	for name, size := range map[string]int{"empty": 0, "ragged": 70001, "longer": 3 << 20} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			base := filetest.Block('b', size)
			filetest.Put(t, dir, "base.raw", base, 0)
			filetest.OverlayOn(t, dir, "top.qcow2", "base.raw", "raw")
			img := openImage(t, filepath.Join(dir, "top.qcow2"))
			want := append(base, make([]byte, 1<<20)...)[:1<<20]
			require.True(t, bytes.Equal(want, filetest.Read(t, img, 0, 1<<20)))
			require.LessOrEqual(t, img.use.total(), min(int64(size), 1<<20)+4096)
		})
	}
}

func TestOffendingBackingFileOfABadOverlayIsNotReportedItself(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "base", []byte("base"), 1<<20)
	filetest.OverlayOn(t, dir, "top.qcow2", "base", "raw")
	filetest.Put(t, dir, "stray", filetest.Block(1, 512), 0)
	reasons := scanErrors(t, dir)
	require.Len(t, reasons, 1)
	require.Contains(t, reasons, "stray")
}

func TestWithoutOpenat2(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "base.raw", []byte("base"), 1<<20)
	filetest.Put(t, dir, "sub/base.raw", []byte("base"), 1<<20)
	require.NoError(t, os.Symlink("base.raw", filepath.Join(dir, "link.raw")))
	for _, missing := range []unix.Errno{unix.ENOSYS, unix.EPERM} {
		d := testtool.Must(openDirectory(dir))(t)
		d.openat2 = func(int, string, *unix.OpenHow) (int, error) { return -1, missing }
		f, _ := testtool.Must2(d.openBeneath("base.raw"))(t)
		f.Close()
		_, _, err := d.openBeneath("sub/base.raw")
		require.ErrorIs(t, err, errNoOpenat2)
		reason, action := explainOpen(err, useBacking)
		require.Contains(t, reason, "openat2")
		require.NotEmpty(t, action)
		require.Error(t, testtool.Err2(d.openBeneath("link.raw")))
		d.close()
	}
}

func TestOpenat2IsAskedAgain(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "base.raw", []byte("base"), 512)
	d := testtool.Must(openDirectory(dir))(t)
	defer d.close()
	calls := 0
	d.openat2 = func(fd int, path string, how *unix.OpenHow) (int, error) {
		if calls++; calls%3 != 0 {
			return -1, unix.EAGAIN
		}
		require.Equal(t, uint64(unix.RESOLVE_BENEATH), how.Resolve&unix.RESOLVE_BENEATH)
		require.Equal(t, uint64(unix.RESOLVE_NO_SYMLINKS), how.Resolve&unix.RESOLVE_NO_SYMLINKS)
		return unix.Openat2(fd, path, how)
	}
	_, f := testtool.Must2(d.openBeneath("base.raw"))(t)
	require.Len(t, testtool.Must(io.ReadAll(f))(t), 512)
	f.Close()
}

func FuzzBackingName(f *testing.F) {
	for _, s := range []string{"base.raw", "../x", "/etc/passwd", "json:{}", "nbd:x", "a/../b",
		"a:b", "a/b:c", "./x", "", "x\x00y", ".."} {
		f.Add("top.qcow2", s)
		f.Add("sub/top.qcow2", s)
	}
	f.Fuzz(func(t *testing.T, overlay, claim string) {
		if !filepath.IsLocal(overlay) {
			return
		}
		name, err := backingName(overlay, claim)
		if err != nil {
			return
		}
		if !filepath.IsLocal(name) || path.IsAbs(name) {
			t.Fatalf("%q in %q becomes %q", claim, overlay, name)
		}
	})
}

// TestChainOfOtherSizes has files that are longer or shorter than those above them: content that a
// shorter file hides does not appear again in a longer one above it.
func TestChainOfOtherSizes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		dir, name := t.TempDir(), ""
		for i := range 7 {
			f := testtool.Must(os.Create(filepath.Join(dir, fmt.Sprint(i))))(t)
			a := testtool.Must(qcow2.NewAppender(f, qcow2.AppendOptions{Backing: name}))(t)
			clusters := 1 + r.IntN(40)
			for _, c := range r.Perm(clusters)[:r.IntN(clusters)] {
				_, err := a.WriteAt(bytes.Repeat([]byte{byte(i * r.IntN(3))}, 4<<10), int64(c)<<12)
				require.NoError(t, err)
			}
			require.NoError(t, testtool.Err(a.Finish(int64(clusters)<<12)))
			require.NoError(t, f.Close())
			name = fmt.Sprint(i)
		}
		img := openImage(t, filepath.Join(dir, name))
		require.NotNil(t, img.flat)
		want, got := make([]byte, img.Size()), make([]byte, img.Size())
		require.NoError(t, testtool.Err(img.ReadAt(t.Context(), got, 0)))
		require.NoError(t, testtool.Err(img.top.ReadAt(t.Context(), want, 0)))
		require.Equal(t, want, got)
		for off := int64(0); off < img.Size(); off += 4 << 10 {
			_, kind := testtool.Must2(img.top.extent(t.Context(), off, 4<<10))(t)
			require.Equal(t, kind, img.flat.at(off).kind, off)
		}
	}
}
