package image

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

func TestConvertOfAChainWithHoles(t *testing.T) {
	dir := t.TempDir()
	base := append(filetest.Block('b', 1<<20), make([]byte, 100<<20)...)
	filetest.Put(t, dir, "base", base[:1<<20], int64(len(base)))
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top.qcow2")
	img := openImage(t, filepath.Join(dir, "top.qcow2"))
	require.EqualValues(t, 1<<20, img.Info().AllocatedSize)
	e := testtool.Must(img.Extent(t.Context(), 0, img.Size()))(t)
	require.Equal(t, disk.Extent{Length: 1 << 20, Data: true}, e)
	e = testtool.Must(img.Extent(t.Context(), 1<<20, img.Size()-1<<20))(t)
	require.False(t, e.Data)
	require.Error(t, testtool.Err(img.Extent(t.Context(), img.Size(), 1)))
	out := filepath.Join(dir, "out.raw")
	require.NoError(t, Convert(t.Context(), img, out, true, nil))
	require.EqualValues(t, 1<<20, filetest.Allocated(t, out))
	require.True(t, bytes.Equal(base, filetest.Content(t, out)))
}

func TestImageReadAtItsEnd(t *testing.T) {
	img := openImage(t, filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block(7, 1024), 0))
	p := make([]byte, 1024)
	n, err := img.ReadAt(t.Context(), p, 512)
	require.Equal(t, 512, n)
	require.Equal(t, io.EOF, err)
	_, err = img.ReadAt(t.Context(), p, 1024)
	require.Equal(t, io.EOF, err)
	require.Error(t, testtool.Err(img.ReadAt(t.Context(), p, -1)))

	require.NoError(t, os.Truncate(img.Path(), 512))
	_, err = img.ReadAt(t.Context(), p, 0)
	var medium *disk.MediumError
	require.ErrorAs(t, err, &medium)
	require.EqualValues(t, 512, medium.Off)
}

func TestConvertDestinations(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "base.raw", []byte("base"), 1<<20)
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw",
		"top.qcow2")
	img := openImage(t, filepath.Join(dir, "top.qcow2"))
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644))
	require.NoError(t, os.Symlink("base.raw", filepath.Join(dir, "link")))
	for name, want := range map[string]string{"top.qcow2": "itself", "base.raw": "backing",
		"fifo": "FIFO", "link": "symbolic link"} {
		require.ErrorContains(t, Convert(t.Context(), img, filepath.Join(dir, name), true, nil),
			want)
	}

	// As a download that was never renamed.
	unfinished := filepath.Join(dir, "disk.img"+durable.PartialSuffix)
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", unfinished, "1M")
	before := filetest.Content(t, unfinished)
	require.ErrorContains(t, Convert(t.Context(), openImage(t, unfinished),
		filepath.Join(dir, "disk.img"), true, nil), `is the image "disk.img.partial" itself`)
	after := filetest.Content(t, unfinished)
	require.True(t, bytes.Equal(before, after), "the image is not touched")

	// A file that a killed process left is taken over, and an older result is replaced.
	out := filetest.Put(t, dir, "out.raw", filetest.Block(9, 5<<20), 0)
	filetest.Put(t, dir, "out.raw"+durable.PartialSuffix, filetest.Block(8, 5<<20), 0)
	require.ErrorContains(t, Convert(t.Context(), img, out, false, nil), "exists already")
	require.ErrorContains(t, ConvertQcow2(t.Context(), img, out, false, "", nil), "exists already")
	require.NoError(t, Convert(t.Context(), img, out, true, nil))
	got := filetest.Content(t, out)
	require.True(t, bytes.Equal(append([]byte("base"), make([]byte, 1<<20-4)...), got))

	// One that is being written is left alone.
	busy := testtool.Must(durable.Create(out, 0o600))(t)
	var locked *durable.LockedError
	require.ErrorAs(t, Convert(t.Context(), img, out, true, nil), &locked)
	require.ErrorIs(t, busy.Finish(context.Canceled), context.Canceled)
	require.NoFileExists(t, out+durable.PartialSuffix)
}

// TestExpansionOfAnImageThatCannotBeRead checks that the error names the place, although other
// workers wait for the range that cannot be read.
func TestExpansionOfAnImageThatCannotBeRead(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	dir := t.TempDir()
	filetest.Put(t, dir, "in.raw", filetest.Block(1, 24<<20), 0)
	for _, option := range []string{"-q", "-c"} {
		filetest.QemuImg(t, dir, "convert", option, "-f", "raw", "-O", "qcow2", "in.raw",
			"in.qcow2")
		img := openImage(t, filepath.Join(dir, "in.qcow2"))
		require.NoError(t, os.Truncate(img.Path(), img.Info().FileSize/2))
		out := testtool.Must(durable.Create(filepath.Join(dir, "out.raw"), 0o600))(t)
		_, err := newCopier(img, NewDestination(out.File, nil), nil, 8).run(t.Context())
		var medium *disk.MediumError
		require.ErrorAs(t, out.Finish(err), &medium)
		require.NoFileExists(t, filepath.Join(dir, "out.raw"))
	}
}

func TestNotEnoughSpaceIsFoundOutFirst(t *testing.T) {
	small := filetest.TinyFS(t, "1m")
	dir := t.TempDir()
	img := openImage(t, filetest.Put(t, dir, "disk.raw", filetest.Block(5, 3<<20), 0))
	var space *SpaceError
	err := Convert(t.Context(), img, filepath.Join(small, "out.raw"), true, nil)
	require.ErrorAs(t, err, &space)
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.EqualValues(t, 3<<20, space.Needed)
	require.Positive(t, space.Available)
	require.LessOrEqual(t, space.Available, int64(1<<20))
	require.Equal(t, small, space.Dir)
	for _, part := range []string{small, "3145728", fmt.Sprint(space.Available), "disk.raw"} {
		require.Contains(t, err.Error(), part)
	}
	filetest.Empty(t, small)

	// A file that is full of stored zeros, as container layers make of a sparse one, does fit.
	zeros := openImage(t, filetest.Put(t, dir, "zeros.raw",
		append(filetest.Block(5, 256<<10), make([]byte, 8<<20)...), 0))
	require.Greater(t, zeros.use.total(), int64(8<<20))
	require.NoError(t, Convert(t.Context(), zeros, filepath.Join(small, "out.raw"), true, nil))

	// A compressed image counts in full: it could keep us busy with terabytes of zeros.
	filetest.QemuImg(t, dir, "convert", "-c", "-f", "raw", "-O", "qcow2", "disk.raw", "bomb.qcow2")
	bomb := openImage(t, filepath.Join(dir, "bomb.qcow2"))
	require.Less(t, bomb.Info().FileSize, int64(1<<20))
	require.EqualValues(t, 3<<20, bomb.use.compressed)
	require.ErrorAs(t, Convert(t.Context(), bomb, filepath.Join(small, "bomb.raw"), true, nil),
		&space)
}

func TestFileSystemThatFillsUpMeanwhile(t *testing.T) {
	small := filetest.TinyFS(t, "1m")
	img := openImage(t, filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block(5, 3<<20), 0))
	out := testtool.Must(durable.Create(filepath.Join(small, "disk.raw"), 0o600))(t)
	_, err := newCopier(img, NewDestination(out.File, nil), nil, 2).run(t.Context())
	err = out.Finish(err)
	var space *SpaceError
	require.ErrorAs(t, err, &space)
	require.ErrorIs(t, err, disk.ErrNoSpace)
	require.Contains(t, err.Error(), small)
	filetest.Empty(t, small)
}

func TestProgressFields(t *testing.T) {
	var p Progress
	p.Start(1000, 500)
	p.add(400, 250)
	fields := zapcore.NewMapObjectEncoder()
	for _, field := range p.Fields(5 * time.Second) {
		field.AddTo(fields)
	}
	require.EqualValues(t, 40, fields.Fields["percent"])
	require.Contains(t, fields.Fields, "mib_per_s")
	require.Equal(t, 5*time.Second, fields.Fields["eta"])
	require.False(t, p.Finished())
	p.Finish()
	require.EqualValues(t, 1000, p.Done())
	data, total := p.Data()
	require.Equal(t, total, data)
}

// TestPowerCutAfterADownload: what a program fetches again until it is there has reached storage
// when it says that it is, and is as long as was asked for.
func TestPowerCutAfterADownload(t *testing.T) {
	dir, cut := filetest.PowerCut(t)
	path, content := filepath.Join(dir, "disk.img"), filetest.Block('a', 1<<20)
	to := testtool.Must(CreateDestination(path, true))(t)
	_, err := to.File().Write(content)
	require.NoError(t, err)
	require.NoError(t, to.Grow(1<<10))
	require.NoError(t, to.Grow(2<<20))
	require.NoError(t, to.Finish(nil))
	cut(true)
	got := testtool.Must(os.ReadFile(path))(t)
	require.Len(t, got, 2<<20)
	require.True(t, bytes.Equal(content, got[:1<<20]))
}

// TestADeviceOfAMachineIsNotOverwritten: QEMU opens a device so that others can, too, and locks it
// in its own way.
func TestADeviceOfAMachineIsNotOverwritten(t *testing.T) {
	_, err := exec.LookPath("losetup")
	testtool.Needs(t, "losetup, and root to use it", err == nil && os.Geteuid() == 0)
	file := filetest.Put(t, t.TempDir(), "device", nil, 1<<20)
	out := testtool.Must(exec.Command("losetup", "--find", "--show", file).Output())(t)
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "--detach", device).Run()) })
	qemu := testtool.Must(os.Open(device))(t)
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1} // it may write
	require.NoError(t, unix.FcntlFlock(qemu.Fd(), unix.F_OFD_SETLK, &lock))
	_, err = OpenDevice(device)
	require.ErrorAs(t, err, new(*durable.LockedError))
	require.NoError(t, qemu.Close())
	to := testtool.Must(OpenDevice(device))(t)
	require.NoError(t, to.Finish(nil))
}
