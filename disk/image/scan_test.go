package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/words"
)

func names(images []*Image) []string {
	var list []string
	for _, img := range images {
		list = append(list, img.Name())
		img.Close()
	}
	return list
}

func TestScanInNaturalOrder(t *testing.T) {
	dir := t.TempDir()
	want := []string{".hidden.raw", "Disk3.img", "a.iso", "disk1.raw", "disk2.raw", "disk10.raw",
		"disk10b.RAW", "x.img"}
	for _, name := range want {
		filetest.Put(t, dir, name, []byte("data"), 1024)
	}
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "lost+found"), 0o700))
	filetest.Put(t, dir, "sub/not-looked-at.txt", []byte("x"), 0)
	require.Equal(t, want, names(testtool.Must(ScanDir(dir, Options{}))(t)))
}

func TestNaturalCompare(t *testing.T) {
	want := []string{"", "0", "00", "01", "1", "2", "10", "10a", "10b", "99999999999999999999999",
		"a", "a1", "a1b", "a2", "a10", "b"}
	for i, a := range want {
		for j, b := range want {
			require.Equal(t, i-j < 0, NaturalCompare(a, b) < 0, "%q %q", a, b)
			require.Equal(t, i == j, NaturalCompare(a, b) == 0, "%q %q", a, b)
		}
	}
}

func FuzzNaturalCompare(f *testing.F) {
	f.Add("a1", "a01", "a10")
	f.Add("0", "00", "")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if NaturalCompare(a, b) != -NaturalCompare(b, a) || (NaturalCompare(a, b) == 0) !=
			(a == b) {
			t.Fatalf("%q and %q have no order", a, b)
		}
		if NaturalCompare(a, b) < 0 && NaturalCompare(b, c) < 0 && NaturalCompare(a, c) >= 0 {
			t.Fatalf("%q, %q, %q are in no order", a, b, c)
		}
	})
}

func TestScanWithoutImages(t *testing.T) {
	dir := t.TempDir()
	_, err := ScanDir(dir, Options{})
	var none *NoImagesError
	require.ErrorAs(t, err, &none)
	require.Contains(t, err.Error(), dir)

	filetest.Put(t, dir, "images/disk.raw", []byte("data"), 512)
	_, err = ScanDir(dir, Options{})
	require.ErrorAs(t, err, &none)
	require.Contains(t, err.Error(), "images")

	_, err = ScanDir(filepath.Join(dir, "missing"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Contains(t, err.Error(), "missing")
	_, err = ScanDir(filetest.Put(t, dir, "file", nil, 0), Options{})
	require.Error(t, err)
	require.False(t, errors.As(err, &none))
}

// One message names everything in the directory that is not an image. Nothing blocks.
func TestScanListsEveryOffendingFile(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	filetest.Put(t, dir, "good.raw", []byte("data"), 1024)
	filetest.Put(t, dir, "zz.txt", []byte("a stray note\n"), 0)
	filetest.Put(t, dir, ".gitkeep", nil, 0)
	filetest.Put(t, dir, "odd.img", []byte("data"), 1000)
	filetest.Put(t, dir, "short.raw", []byte("data"), 0)
	filetest.Put(t, dir, "empty.raw", nil, 0)
	filetest.Put(t, dir, "vm.raw", []byte("KDMV"), 512)
	filetest.Put(t, dir, "disk.raw.xz", []byte("\xfd7zXZ\x00"), 512)
	filetest.Put(t, dir, "disk.img.gz", []byte("\x1f\x8b\x08"), 512)
	filetest.Put(t, dir, "noext", filetest.Block(1, 512), 0)
	filetest.Put(t, dir, "fake.qcow2", filetest.Block(1, 512), 0)
	filetest.Put(t, dir, "broken.qcow2", []byte("QFI\xfb\x00\x00\x00\x03"), 512)
	filetest.Put(t, dir, "bad\nname\x1b.bin", filetest.Block(1, 512), 0)
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "killed.qcow2.partial", "1M")
	secret := filetest.Put(t, outside, "secret.raw", []byte("secret"), 512)
	require.NoError(t, os.Symlink(secret, filepath.Join(dir, "link-out.raw")))
	require.NoError(t, os.Symlink("good.raw", filepath.Join(dir, "link-in.raw")))
	require.NoError(t, os.Symlink("nowhere", filepath.Join(dir, "dangling.raw")))
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, "..data")))
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo.raw"), 0o644))
	socket := testtool.Must(net.Listen("unix", filepath.Join(dir, "sock.raw")))(t)
	defer socket.Close()
	want := map[string]string{
		"zz.txt": "text file", "odd.img": "1000 bytes", "short.raw": "4 bytes",
		"empty.raw": "empty",
		"vm.raw":    "VMDK", "disk.raw.xz": "convert disk.raw.xz disk.raw",
		"disk.img.gz": "convert disk.img.gz disk.img", "noext": ".raw",
		"fake.qcow2":   "qcow2 header",
		"broken.qcow2": "not valid", "link-out.raw": "symbolic link",
		"link-in.raw": "symbolic link", "dangling.raw": "symbolic link",
		"..data": "symbolic link", "fifo.raw": "FIFO", "sock.raw": "socket",
		"bad\nname\x1b.bin": ".raw", "killed.qcow2.partial": "not complete",
	}
	if unix.Mknod(filepath.Join(dir, "null.raw"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) ==
		nil {
		want["null.raw"] = "character device"
	}
	if unix.Mknod(filepath.Join(dir, "loop.raw"), unix.S_IFBLK|0o666, int(unix.Mkdev(7, 250))) ==
		nil {
		want["loop.raw"] = "block device"
	}
	reasons := scanErrors(t, dir)
	for name, reason := range want {
		require.Contains(t, reasons[name], reason, "%q", name)
	}
	require.Len(t, reasons, len(want))

	_, err := ScanDir(dir, Options{})
	require.NotContains(t, err.Error(), "\x1b", "a name cannot control the terminal")
	require.NotContains(t, err.Error(), "good.raw:")
	var bad *ScanError
	require.ErrorAs(t, err, &bad)
	require.True(t, slices.IsSortedFunc(bad.Files,
		func(a, b *Error) int { return NaturalCompare(a.Name, b.Name) }))
}

// Empty and hidden files that nobody meant to be images do not keep a directory from being served.
func TestScanPassesOver(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, ".keep", nil, 0)
	filetest.Put(t, dir, "README", nil, 0)
	filetest.Put(t, dir, ".gitignore", []byte("*\n"), 0)
	filetest.Put(t, dir, "._a.qcow2", []byte("\x00\x05\x16\x07"), 4096)
	want := []string{"._a.qcow2", ".gitignore", ".keep", "README"}
	var none *NoImagesError
	_, err := ScanDir(dir, Options{})
	require.ErrorAs(t, err, &none)
	require.ErrorContains(t, err, ".keep")
	require.ErrorAs(t, testtool.Err(InspectDir(dir, Options{})), &none)

	filetest.Put(t, dir, "a.raw", []byte("data"), 1024)
	filetest.Put(t, dir, ".b.raw", []byte("data"), 1024)
	var passed []string
	images := testtool.Must(ScanDir(dir, Options{PassedOver: func(why *Error) {
		passed = append(passed, why.Name)
	}}))(t)
	require.Equal(t, []string{".b.raw", "a.raw"}, names(images))
	require.Equal(t, want, passed)
	require.Len(t, testtool.Must(InspectDir(dir, Options{}))(t), 2)

	filetest.Put(t, dir, ".c.qcow2", []byte("QFI\xfb\x00\x00\x00\x03"), 512)
	_, err = ScanDir(dir, Options{})
	require.ErrorContains(t, err, ".c.qcow2", "somebody meant it to be an image")
}

func TestScanOfAFileThatCannotBeRead(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("needs a user other than root, who can read everything")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filetest.Put(t, dir, "disk.raw", []byte("data"), 512), 0))
	require.Contains(t, scanErrors(t, dir)["disk.raw"], "cannot be read by user")
}

func TestSizeLimitOfRawImages(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	_, err := ScanDir(dir, Options{MaxVirtualSize: 1<<20 - 1})
	require.ErrorContains(t, err, "limit")
	names(testtool.Must(ScanDir(dir, Options{MaxVirtualSize: 1 << 20}))(t))
}

func TestInspect(t *testing.T) {
	dir := t.TempDir()
	info := testtool.Must(Inspect(filetest.Put(t, dir, "disk.raw", filetest.Block(1, 8192), 1<<20),
		Options{}))(t)
	require.True(t, info.Servable)
	require.Empty(t, info.Reason)
	require.Equal(t, FormatRaw, info.Format)
	require.EqualValues(t, 1<<20, info.VirtualSize)
	require.EqualValues(t, 1<<20, info.FileSize)
	require.NotNil(t, info.BackingChain, "an empty list in JSON, not null")

	info, err := Inspect(filetest.Put(t, dir, "notes.txt", []byte("text"), 0), Options{})
	require.NoError(t, err)
	require.False(t, info.Servable)
	require.Contains(t, info.Reason, "text file")
	require.EqualValues(t, 4, info.FileSize)
	require.Zero(t, info.VirtualSize, "it is no disk")
	require.NotNil(t, info.BackingChain)

	info, err = Inspect(filetest.Put(t, dir, "cut.qcow2", []byte("QFI\xfb\x00\x00\x00\x03"), 1<<16),
		Options{})
	require.NoError(t, err)
	require.Equal(t, FormatQcow2, info.Format)
	require.EqualValues(t, 1<<16, info.FileSize)
	require.Zero(t, info.VirtualSize, "its header does not say one")
	require.Zero(t, info.AllocatedSize)

	link := filepath.Join(dir, "link.raw")
	require.NoError(t, os.Symlink("disk.raw", link))
	info = testtool.Must(Inspect(link, Options{}))(t)
	require.False(t, info.Servable)
	require.Contains(t, info.Reason, "symbolic link")
	info = testtool.Must(Inspect(link, Options{Named: true}))(t)
	require.True(t, info.Servable)
	require.Equal(t, "link.raw", info.Name)

	// Claims of a refused image about itself are still shown.
	filetest.QemuImg(t, dir, "create", "-q", "-u", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw",
		"top.qcow2", "1M")
	info = testtool.Must(Inspect(filepath.Join(dir, "top.qcow2"), Options{}))(t)
	require.False(t, info.Servable)
	require.Equal(t, 3, info.Version)
	require.EqualValues(t, 1<<20, info.VirtualSize)
	require.EqualValues(t, 64<<10, info.ClusterSize)
	require.Contains(t, info.Reason, "absolute")
	text := testtool.Must(json.Marshal(info))(t)
	for _, key := range []string{"format", "version", "virtual_size", "allocated_size",
		"cluster_size", "backing_chain", "servable", "reason"} {
		require.Contains(t, string(text), `"`+key+`":`)
	}

	_, err = Inspect(filepath.Join(dir, "missing.raw"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Inspect(filepath.Join(dir, "missing", "disk.raw"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestInspectDir looks at a directory as ScanDir does, and describes what is good and what is not.
func TestInspectDir(t *testing.T) {
	dir := t.TempDir()
	infos, err := InspectDir(dir, Options{})
	require.ErrorAs(t, err, new(*NoImagesError))
	require.Nil(t, infos)
	_, err = InspectDir(filepath.Join(dir, "missing"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)

	require.NoError(t, os.MkdirAll(filepath.Join(dir, "lost+found"), 0o700))
	filetest.Put(t, dir, "disk2.raw", []byte("data"), 1024)
	filetest.Put(t, dir, "base", []byte("data"), 1<<20)
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw",
		"disk10.qcow2")
	described := func() (all map[string]Info, order []string) {
		infos := testtool.Must(InspectDir(dir, Options{}))(t)
		all = map[string]Info{}
		for _, info := range infos {
			all[info.Name] = info
			order = append(order, info.Name)
		}
		return all, order
	}
	all, order := described()
	require.Equal(t, []string{"disk2.raw", "disk10.qcow2"}, order,
		"a backing file is no image of its own")
	require.True(t, all["disk2.raw"].Servable)
	require.Equal(t, "base", all["disk10.qcow2"].BackingChain[0].Name)

	filetest.Put(t, dir, "notes.txt", []byte("buy milk\n"), 0)
	filetest.QemuImg(t, dir, "create", "-q", "-u", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw",
		"out.qcow2", "1M")
	all, order = described()
	require.Equal(t, []string{"disk2.raw", "disk10.qcow2", "notes.txt", "out.qcow2"}, order)
	require.False(t, all["notes.txt"].Servable)
	require.Contains(t, all["notes.txt"].Reason, "remove it from the image directory")
	require.EqualValues(t, 9, all["notes.txt"].FileSize)
	require.EqualValues(t, 1<<20, all["out.qcow2"].VirtualSize)
	for name, reason := range scanErrors(t, dir) {
		require.Equal(t, reason, all[name].Reason,
			"what is served and what is inspected are told the same")
	}
}

// TestScanOfAChain: of many files in one chain, the top is opened, and nothing twice.
func TestScanOfAChain(t *testing.T) {
	dir := t.TempDir()
	below := ""
	const files = 100
	for i := range files {
		name := fmt.Sprintf("level%d.qcow2", i)
		f := testtool.Must(os.Create(filepath.Join(dir, name)))(t)
		w := testtool.Must(qcow2.NewAppender(f, qcow2.AppendOptions{Backing: below}))(t)
		require.NoError(t, testtool.Err(w.Finish(1<<20)))
		require.NoError(t, f.Close())
		below = name
	}
	opened := 0
	images, err := ScanDir(dir, Options{Digest: func(string) string { opened++; return "" }})
	require.NoError(t, err)
	require.Equal(t, []string{below}, names(images))
	require.Equal(t, files, opened)
}

func TestScanErrorIsTheErrorOfEveryFile(t *testing.T) {
	cause := &fs.PathError{Op: "read", Path: "b", Err: unix.EIO}
	err := fmt.Errorf("start: %w", &ScanError{Dir: "/disk", Files: []*Error{
		{Name: "a", Reason: "is empty"},
		{Name: "b", Reason: "cannot be read", Action: "fetch it again", Err: cause},
	}})
	require.ErrorIs(t, err, unix.EIO)
	var image *Error
	require.ErrorAs(t, err, &image)
	require.Equal(t, "start: 2 files in \"/disk\" cannot be served:\n  \"a\": is empty\n  \"b\": "+
		"cannot be read; fetch it again", err.Error())
	require.Contains(t, (&ScanError{Dir: "/disk", Files: []*Error{image}}).Error(),
		`1 file in "/disk"`)
}

func TestExplainOpen(t *testing.T) {
	for cause, want := range map[error]string{
		unix.ELOOP: "symbolic link", unix.EXDEV: "outside the directory of the image",
		unix.ENOENT: "does not exist",
		unix.EACCES: "cannot be read by user", unix.EMFILE: "cannot be opened",
		&notRegularError{"a socket"}: "is a socket",
	} {
		reason, _ := explainOpen(&fs.PathError{Op: "open", Path: "x", Err: cause}, useFound)
		require.Contains(t, reason, want)
	}
}

func TestSizesForPeople(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB",
		1000 << 10: "1000 KiB", 12345: "12.1 KiB", 123456: "121 KiB", 1300: "1.27 KiB",
		1048575:  "1 MiB",
		10 << 30: "10 GiB", 64 << 40: "64 TiB", 1<<63 - 1: "8 EiB"} {
		require.Equal(t, want, words.Bytes(n))
	}
}
