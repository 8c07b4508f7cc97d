package provide

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

func open(t *testing.T, path string) *image.Image {
	t.Helper()
	img := testtool.Must(image.Open(path, image.Options{}))(t)
	t.Cleanup(func() { _ = img.Close() })
	return img
}

// rawImage makes an image with data at both ends of a hole.
func rawImage(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	f := testtool.Must(os.Create(path))(t)
	defer f.Close()
	require.NoError(t, f.Truncate(40<<20))
	for off, b := range map[int64]byte{0: 1, 39 << 20: 2} {
		require.NoError(t, testtool.Err(f.WriteAt(bytes.Repeat([]byte{b}, 1<<20), off)))
	}
	return path
}

// TestCopyKeepsHoles copies within the file system, and to another one, where the kernel may not be
// able to.
func TestCopyKeepsHoles(t *testing.T) {
	path := rawImage(t)
	want := filetest.Content(t, path)
	for name, dir := range map[string]string{"here": t.TempDir(), "in memory": memory(t)} {
		t.Run(name, func(t *testing.T) {
			p := &providing{img: open(t, path), dir: dir, path: filepath.Join(dir, "x.raw")}
			p.opt.Progress = new(image.Progress)
			src := testtool.Must(p.img.OpenFile())(t)
			defer src.Close()
			dst := testtool.Must(os.Create(p.path))(t)
			defer dst.Close()
			require.NoError(t, p.copy(t.Context(), dst, src))
			require.True(t, bytes.Equal(want, filetest.Content(t, p.path)))
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(dst.Fd()), &st))
			require.Less(t, st.Blocks*512, int64(8<<20), "the hole is a hole")
		})
	}
}

func memory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "provide-")
	testtool.Needs(t, "/dev/shm", err == nil)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestAnInterruptionLeavesNothing ends the context before the copy.
func TestAnInterruptionLeavesNothing(t *testing.T) {
	dir := memory(t) // another file system, so that it has to be copied
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Provide(ctx, open(t, rawImage(t)), Options{To: filepath.Join(dir, "disk")})
	require.ErrorIs(t, err, context.Canceled)
	filetest.Empty(t, dir)
}

// TestBackingFilesBecomeOneRawFile makes a file that QEMU can use where the backing file is not.
func TestBackingFilesBecomeOneRawFile(t *testing.T) {
	dir := t.TempDir()
	base, top := filepath.Join(dir, "base.raw"), filepath.Join(dir, "top.qcow2")
	require.NoError(t, os.WriteFile(base, bytes.Repeat([]byte{5}, 1<<20), 0o644))
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", top)
	to := filepath.Join(t.TempDir(), "disk")
	f := testtool.Must(Provide(t.Context(), open(t, top), Options{To: to}))(t)
	require.Equal(t, to+".raw", f.Path)
	require.Equal(t, "conversion", f.How)
	require.True(t, bytes.Equal(bytes.Repeat([]byte{5}, 1<<20), filetest.Content(t, f.Path)))
	require.NoError(t, f.Remove())
	filetest.Empty(t, filepath.Dir(to))

	// Without backing files, it keeps its format.
	alone := filepath.Join(t.TempDir(), "alone.qcow2")
	filetest.QemuImg(t, dir, "convert", "-O", "qcow2", top, alone)
	f = testtool.Must(Provide(t.Context(), open(t, alone), Options{To: to}))(t)
	require.Equal(t, to+".qcow2", f.Path)
	require.NoError(t, f.Remove())
}

// TestAnExchangedImageIsNoticed exchanges the file between its validation and the copy.
func TestAnExchangedImageIsNoticed(t *testing.T) {
	path := rawImage(t)
	img := open(t, path)
	require.NoError(t, os.Rename(path, path+".old"))
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{3}, 4096), 0o644))
	_, err := Provide(t.Context(), img, Options{To: filepath.Join(t.TempDir(), "disk")})
	require.ErrorContains(t, err, "was exchanged")
}

// TestTheImageIsToldByItsContent has two images with everything else in common.
func TestTheImageIsToldByItsContent(t *testing.T) {
	path, to := rawImage(t), filepath.Join(t.TempDir(), "disk")
	opened := func(f *File) int {
		return testtool.Must(unix.FcntlInt(f.file.Fd(), unix.F_GETFL, 0))(t) & unix.O_ACCMODE
	}
	f := testtool.Must(Provide(t.Context(), open(t, path), Options{To: to}))(t)
	require.Equal(t, unix.O_RDWR, opened(f), "NFS gives an exclusive lock of nothing else")
	require.NoError(t, f.release()) // as a kill does
	again := testtool.Must(Provide(t.Context(), open(t, path), Options{To: to}))(t)
	require.Equal(t, "kept", again.How)
	require.Equal(t, unix.O_RDWR, opened(again))
	require.NoError(t, again.release())
	file := testtool.Must(os.OpenFile(path, os.O_WRONLY, 0))(t)
	require.NoError(t, testtool.Err(file.WriteAt([]byte{77}, 0)))
	require.NoError(t, file.Close())
	_, err := Provide(t.Context(), open(t, path), Options{To: to})
	require.ErrorContains(t, err, "another image")
	require.FileExists(t, to+".raw")
}

// TestTheBackingFileIsAPartOfTheImage: an overlay that a build has just made is always the same.
func TestTheBackingFileIsAPartOfTheImage(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir, to := t.TempDir(), filepath.Join(t.TempDir(), "disk")
	base := filetest.Put(t, dir, "base.raw", filetest.Sample(1<<20, 5), 0)
	filetest.QemuImg(t, dir, "create", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "top.qcow2")
	top := filepath.Join(dir, "top.qcow2")
	for _, how := range []string{"conversion", "kept"} {
		f := testtool.Must(Provide(t.Context(), open(t, top), Options{To: to}))(t)
		require.Equal(t, how, f.How)
		require.NoError(t, f.release()) // as a kill does
	}
	require.NoError(t, os.WriteFile(base, filetest.Sample(1<<20, 6), 0o644))
	_, err := Provide(t.Context(), open(t, top), Options{To: to})
	require.ErrorContains(t, err, "another image")
}

// TestAnImageIsNotWritten: the file of a run that was killed may be the image's own, which others
// use, too.
func TestAnImageIsNotWritten(t *testing.T) {
	dir := t.TempDir()
	path := filetest.Put(t, dir, "image.raw", filetest.Sample(1<<20, 5), 0)
	opt := Options{To: filepath.Join(dir, "vm", "disk"), ReadOnly: true}
	f := testtool.Must(Provide(t.Context(), open(t, path), opt))(t)
	require.NoError(t, f.release()) // as a kill does
	filetest.Put(t, dir, "new.raw", filetest.Content(t, path), 0)
	require.NoError(t, os.Rename(filepath.Join(dir, "new.raw"), path)) // as an upgrade does
	opt.ReadOnly = false
	_, err := Provide(t.Context(), open(t, path), opt)
	require.ErrorContains(t, err, "was made to be read only")
	require.FileExists(t, opt.To+".raw")
	opt.ReadOnly = true
	f = testtool.Must(Provide(t.Context(), open(t, path), opt))(t)
	require.NoError(t, f.Remove())
}

// TestAFileThatCannotBeOpenedNow: the next run knows it still. And nothing is replaced that
// somebody has put there since.
func TestAFileThatCannotBeOpenedNow(t *testing.T) {
	path, to := rawImage(t), filepath.Join(t.TempDir(), "disk")
	f := testtool.Must(Provide(t.Context(), open(t, path), Options{To: to}))(t)
	require.NoError(t, f.release())
	require.NoError(t, os.Rename(to+".raw", to+".away"))
	require.NoError(t, os.Symlink(to+".away", to+".raw")) // it is refused, as EMFILE and EIO are
	_, err := Provide(t.Context(), open(t, path), Options{To: to})
	require.ErrorIs(t, err, unix.ELOOP)
	require.NoError(t, os.Rename(to+".away", to+".raw"))
	f = testtool.Must(Provide(t.Context(), open(t, path), Options{To: to}))(t)
	require.Equal(t, "kept", f.How)
	require.NoError(t, f.Remove())
	require.NoError(t, os.WriteFile(f.Path, []byte("somebody's"), 0o600))
	p := &providing{img: open(t, path), dir: filepath.Dir(to), path: f.Path, file: f}
	require.ErrorContains(t, p.makeFile(t.Context(), record{}), "this program has not made it")
	require.ErrorContains(t, p.open(), "this program has not made it", "it would be removed")
	require.NoError(t, f.release())
}

func TestADamagedRecordIsNotGuessed(t *testing.T) {
	path, dir := rawImage(t), t.TempDir()
	for _, text := range []string{"", "{", `{"file":"../x","instance":"1"}`, `{"file":"x"}`} {
		record := filepath.Join(dir, ".disk.provided")
		require.NoError(t, os.WriteFile(record, []byte(text), 0o600))
		_, err := Provide(t.Context(), open(t, path), Options{To: filepath.Join(dir, "disk")})
		require.ErrorContains(t, err, "is damaged")
		require.FileExists(t, record)
	}
}

// TestNobodyReplacesTheFile: while a file is provided, it is no image, and is not replaced.
func TestNobodyReplacesTheFile(t *testing.T) {
	path := rawImage(t)
	hold := image.Options{Hold: true}
	for _, readOnly := range []bool{false, true} {
		img := testtool.Must(image.Open(path, hold))(t)
		f := testtool.Must(Provide(t.Context(), img, Options{To: filepath.Join(t.TempDir(), "disk"),
			ReadOnly: readOnly}))(t)
		taken, err := image.Open(f.Path, hold)
		if readOnly {
			require.NoError(t, err)
			require.NoError(t, taken.Close())
		} else {
			require.ErrorContains(t, err, "in use by another process")
		}
		require.ErrorAs(t, image.Convert(t.Context(), open(t, rawImage(t)), f.Path, true, nil),
			new(*durable.LockedError))
		require.NoError(t, f.Remove())
		require.NoError(t, img.Close())
	}
}
