package instance

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

const guestSize = 1 << 20

// guestWrites are writes of a guest that make its raw disk look like something else.
func guestWrites(t testing.TB) map[string]func(d disk.Disk) {
	at := func(off int64, sector string) func(disk.Disk) {
		return func(d disk.Disk) {
			p := make([]byte, disk.SectorSize)
			copy(p, sector)
			filetest.Write(t, d, p, off)
		}
	}
	dir := t.TempDir()
	filetest.Put(t, dir, "secret.raw", nil, guestSize)
	filetest.OverlayOn(t, dir, "top.qcow2", "secret.raw", "raw")
	header := filetest.Content(t, filepath.Join(dir, "top.qcow2"))
	return map[string]func(disk.Disk){
		"luks": at(0, "LUKS\xba\xbe\x00\x02"),
		"gzip": at(0, "\x1f\x8b\x08"),
		"vmdk": at(0, "KDMV"),
		"tar":  at(0, strings.Repeat("\x00", 257)+"ustar"),
		"vhd":  at(guestSize-disk.SectorSize, "conectix"),
		"qcow2": func(d disk.Disk) {
			padded := append(header, make([]byte, -len(header)&(disk.SectorSize-1))...)
			filetest.Write(t, d, padded, 0)
		},
	}
}

// startScanned serves a file of a directory as a daemon does: it validates all files first.
func startScanned(t *testing.T, dir, name string, images int, opt Options) *Instance {
	t.Helper()
	all := testtool.Must(image.ScanDir(dir, image.Options{}))(t)
	require.Len(t, all, images, "the others are served, too")
	var inst *Instance
	for _, img := range all {
		if img.Name() != name {
			require.NoError(t, img.Close())
			continue
		}
		require.Equal(t, image.FormatRaw, img.Info().Format)
		inst = testtool.Must(Open(t.Context(), img, opt))(t)
		t.Cleanup(func() { inst.Close() })
	}
	require.NotNil(t, inst)
	return inst
}

// TestServedRawStaysRaw: a file that was served raw stays raw, whatever the guest writes, in every
// copy mode, after the work directory is lost, and under another name.
func TestServedRawStaysRaw(t *testing.T) {
	for looks, write := range guestWrites(t) {
		t.Run(looks, func(t *testing.T) {
			dir := t.TempDir()
			content := filetest.Sample(guestSize, 1)
			filetest.Put(t, dir, "a.raw", content, 0)
			filetest.Put(t, dir, "secret.raw", filetest.Block('s', guestSize), 0)
			inst := startScanned(t, dir, "a.raw", 2, Options{WorkDir: t.TempDir(), Mode: CopyNone})
			info := testtool.Must(image.Inspect(filepath.Join(dir, "a.raw"), image.Options{}))(t)
			require.Equal(t, image.SourceServed, info.FormatSource, "before the guest writes")
			write(inst)
			want := filetest.ReadAll(t, inst, guestSize)
			require.NotEqual(t, content, want)
			require.NoError(t, inst.Close())

			name := "a.raw"
			for _, mode := range []CopyMode{CopyNone, CopyOnWrite, CopyOnRead, CopyClone,
				CopyNone} {
				inst := startScanned(t, dir, name, 2, Options{WorkDir: t.TempDir(), Mode: mode})
				require.True(t, bytes.Equal(want, filetest.ReadAll(t, inst, guestSize)), mode)
				require.NoError(t, inst.Close())
			}
			info = testtool.Must(image.Inspect(filepath.Join(dir, name), image.Options{}))(t)
			require.Equal(t, image.FormatRaw, info.Format)
			require.Equal(t, image.SourceServed, info.FormatSource)
			require.Equal(t, image.Format(looks), info.LooksLike)
			require.True(t, info.Servable)

			require.NoError(t, os.Rename(filepath.Join(dir, name), filepath.Join(dir, "renamed")))
			inst = startScanned(t, dir, "renamed", 2,
				Options{WorkDir: t.TempDir(), Mode: CopyOnWrite})
			require.True(t, bytes.Equal(want, filetest.ReadAll(t, inst, guestSize)))
			require.NoError(t, inst.Close())
			require.NoError(t, os.Rename(filepath.Join(dir, "renamed"), filepath.Join(dir, name)))

			// Another file of this name is not marked.
			require.NoError(t, os.WriteFile(filepath.Join(dir, "new"), want, 0o644))
			require.NoError(t, os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, name)))
			reason := scanReasons(t, dir)[name]
			require.Contains(t, reason, `set "format: raw" for it under "disks"`)

			images := testtool.Must(image.ScanDir(dir,
				image.Options{Formats: map[string]image.Format{name: image.FormatRaw}}))(t)
			require.Len(t, images, 2)
			require.Equal(t, image.SourceTold, images[0].Info().FormatSource)
			require.True(t, bytes.Equal(want, filetest.ReadAll(t, images[0], guestSize)))
			for _, img := range images {
				require.NoError(t, img.Close())
			}
		})
	}
}

// TestServedRawWithoutAttributes: on a file system without extended attributes, the mark is a file
// beside the image.
func TestServedRawWithoutAttributes(t *testing.T) {
	testtool.Needs(t, "root (to mount a file system)", os.Geteuid() == 0)
	dir := t.TempDir()
	err := unix.Mount("ramfs", dir, "ramfs", 0, "")
	testtool.Needs(t, "root with CAP_SYS_ADMIN (to mount a file system)", err == nil)
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	path := filetest.Put(t, dir, "a.raw", nil, guestSize)
	f := testtool.Must(os.Open(path))(t)
	require.ErrorIs(t, image.MarkRaw(f, ""), unix.EOPNOTSUPP,
		"the test needs a file system without attributes")
	require.NoError(t, f.Close())

	inst := startScanned(t, dir, "a.raw", 1, Options{WorkDir: t.TempDir(), Mode: CopyNone})
	guestWrites(t)["luks"](inst)
	want := filetest.ReadAll(t, inst, guestSize)
	require.NoError(t, inst.Close())
	require.NoError(t, os.Rename(path, filepath.Join(dir, "b.raw")))
	for _, mode := range []CopyMode{CopyNone, CopyOnWrite} {
		inst = startScanned(t, dir, "b.raw", 1, Options{WorkDir: t.TempDir(), Mode: mode})
		require.True(t, bytes.Equal(want, filetest.ReadAll(t, inst, guestSize)))
		require.NoError(t, inst.Close())
	}

	require.NoError(t, os.Remove(filepath.Join(dir, "b.raw")))
	_, err = image.ScanDir(dir, image.Options{})
	var none *image.NoImagesError
	require.ErrorAs(t, err, &none)
	require.Empty(t, none.Directories, "the subdirectory is our own")
	filetest.Put(t, dir, "b.raw", want, 0)
	require.Contains(t, scanReasons(t, dir)["b.raw"], "LUKS")

	// The disk of a volume keeps its mark there too.
	volume := filepath.Join(dir, "volume")
	filetest.Put(t, volume, PersistentName, nil, guestSize)
	inst = testtool.Must(Open(t.Context(), nil, Options{PersistentDir: volume}))(t)
	guestWrites(t)["qcow2"](inst)
	want = filetest.ReadAll(t, inst, guestSize)
	require.NoError(t, inst.Close())
	img := openGood(t, filepath.Join(volume, PersistentName))
	require.Equal(t, image.SourceServed, img.Info().FormatSource)
	require.True(t, bytes.Equal(want, filetest.ReadAll(t, img, guestSize)))
}

// TestServedRawThatCannotBeRemembered: if the mark cannot be stored, the disk is served and the log
// says what to do. A header that names another file is still not followed.
func TestServedRawThatCannotBeRemembered(t *testing.T) {
	testtool.Needs(t, "root (to mount a file system)", os.Geteuid() == 0)
	from, dir := t.TempDir(), t.TempDir()
	err := unix.Mount("ramfs", from, "ramfs", 0, "")
	testtool.Needs(t, "root with CAP_SYS_ADMIN (to mount a file system)", err == nil)
	t.Cleanup(func() { unix.Unmount(from, unix.MNT_DETACH) })
	filetest.Put(t, from, "a.raw", nil, guestSize)
	path := filetest.Put(t, dir, "a.raw", nil, 0)
	filetest.Put(t, dir, "secret.raw", filetest.Block('s', guestSize), 0)
	require.NoError(t, unix.Mount(filepath.Join(from, "a.raw"), path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	inst, logs := start(t, path, Options{WorkDir: t.TempDir(), Mode: CopyNone})
	require.Equal(t, 1, logs.FilterMessageSnippet(`say so by "format: raw"`).Len())
	guestWrites(t)["qcow2"](inst)
	require.NoError(t, inst.Close())
	require.Contains(t, scanReasons(t, dir)["a.raw"], "is named as a raw disk")
}

// TestHeaderOfAGuestIsNotFollowed: a disk without a mark, or a copy of one, does not read another
// file of the directory.
func TestHeaderOfAGuestIsNotFollowed(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "secret.raw", filetest.Block('s', guestSize), 0)
	filetest.OverlayOn(t, dir, "a.raw", "secret.raw", "raw")
	require.NoError(t, os.Truncate(filepath.Join(dir, "a.raw"), guestSize))
	reason := scanReasons(t, dir)["a.raw"]
	require.Contains(t, reason,
		`begins with a qcow2 header that names the backing file "secret.raw"`)
	require.Contains(t, reason, `otherwise set "format: raw"`)
	_, err := image.Open(filepath.Join(dir, "a.raw"), image.Options{})
	require.ErrorContains(t, err, "otherwise say --format raw")

	told := func(f image.Format) image.Options {
		return image.Options{Formats: map[string]image.Format{"a.raw": f}}
	}
	img := testtool.Must(image.Open(filepath.Join(dir, "a.raw"), told(image.FormatQcow2)))(t)
	require.Equal(t, filetest.Block('s', 512), filetest.ReadAll(t, img, 512))
	require.NoError(t, img.Close())
	img = testtool.Must(image.Open(filepath.Join(dir, "a.raw"), told(image.FormatRaw)))(t)
	require.Equal(t, []byte("QFI\xfb"), filetest.ReadAll(t, img, 4))
	require.NoError(t, img.Close())
}

// TestToldFormat: a format that a person gives must be true, and must not make a header count that
// a guest may have written.
func TestToldFormat(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "plain.raw", nil, guestSize)
	filetest.Put(t, dir, "no-name", nil, guestSize)
	filetest.Put(t, dir, "disk.vmdk", []byte("KDMV"), guestSize)
	filetest.Put(t, dir, "odd.raw", nil, 700)
	filetest.Put(t, dir, "odd.vmdk", []byte("KDMV"), 700)
	filetest.Put(t, dir, "empty.raw", nil, 0)
	open := func(name string, f image.Format) (*image.Image, error) {
		return image.Open(filepath.Join(dir, name),
			image.Options{Formats: map[string]image.Format{name: f}})
	}
	for _, name := range []string{"plain.raw", "no-name", "disk.vmdk"} {
		img := testtool.Must(open(name, image.FormatRaw))(t)
		require.Equal(t, image.SourceTold, img.Info().FormatSource)
		require.NoError(t, img.Close())
	}
	for _, c := range []struct {
		name   string
		format image.Format
		want   string
	}{
		{"plain.raw", image.FormatQcow2, "does not begin with a qcow2 header"},
		{"disk.vmdk", image.FormatQcow2, "is a VMDK image"},
		{"plain.raw", "vmdk", `format "vmdk" is unknown: use raw or qcow2`},
		{"odd.raw", image.FormatRaw, "not a multiple of 512"},
		{"odd.vmdk", image.FormatRaw,
			"looks like vmdk, is taken for a raw disk, as it is set to be that"},
		{"odd.vmdk", image.FormatRaw, "correct the format"},
		{"empty.raw", image.FormatRaw, "is empty"},
		{"missing.raw", image.FormatRaw, "does not exist"},
	} {
		require.ErrorContains(t, testtool.Err(open(c.name, c.format)), c.want)
	}

	inst, _ := start(t, filepath.Join(dir, "plain.raw"),
		Options{WorkDir: t.TempDir(), Mode: CopyNone})
	guestWrites(t)["qcow2"](inst)
	require.NoError(t, inst.Close())
	_, err := open("plain.raw", image.FormatQcow2)
	require.ErrorContains(t, err, "was served raw before")

	// In mode none it is served in the given format.
	img := testtool.Must(open("disk.vmdk", image.FormatRaw))(t)
	inst = testtool.Must(Open(t.Context(), img, Options{WorkDir: t.TempDir(), Mode: CopyNone}))(t)
	require.NoError(t, inst.Close())
}

// TestServedRawAndOverwritten: a file keeps its mark when an image is copied over it. An image
// rarely has the size of a disk. So the message says how the file is read, and why.
func TestServedRawAndOverwritten(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", nil, guestSize)
	inst, _ := start(t, path, Options{WorkDir: t.TempDir(), Mode: CopyNone})
	require.NoError(t, inst.Close())
	require.NoError(t, os.WriteFile(path, []byte("QFI\xfb, in 196616 bytes"), 0o600))
	_, err := image.Open(path, image.Options{})
	require.ErrorContains(t, err,
		"looks like qcow2, is taken for a raw disk, as it was served raw before")
	require.ErrorContains(t, err, "copy it to a new file")
}

// TestServedReadOnlyIsNotRemembered: a disk that is only read gets no mark.
func TestServedReadOnlyIsNotRemembered(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", nil, guestSize)
	inst, _ := start(t, path, Options{WorkDir: t.TempDir(), Mode: CopyNone, ReadOnly: true})
	require.NoError(t, inst.Close())
	require.Equal(t, image.SourceContent, openGood(t, path).Info().FormatSource)
}

// TestServedRawAsBackingFile: a marked file is raw as a backing file too.
func TestServedRawAsBackingFile(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "base.raw", nil, guestSize)
	filetest.Put(t, dir, "secret.raw", filetest.Block('s', guestSize), 0)
	inst, _ := start(t, filepath.Join(dir, "base.raw"),
		Options{WorkDir: t.TempDir(), Mode: CopyNone})
	guestWrites(t)["qcow2"](inst)
	want := filetest.ReadAll(t, inst, guestSize)
	require.NoError(t, inst.Close())

	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw",
		"top.qcow2")
	img := openGood(t, filepath.Join(dir, "top.qcow2"))
	require.True(t, bytes.Equal(want, filetest.ReadAll(t, img, guestSize)))
	require.Equal(t, image.SourceServed, img.Info().BackingChain[0].FormatSource)

	filetest.QemuImg(t, dir, "rebase", "-u", "-F", "qcow2", "-b", "base.raw", "top.qcow2")
	_, err := image.Open(filepath.Join(dir, "top.qcow2"), image.Options{})
	require.ErrorContains(t, err, "it was served raw before")
}

// TestOwnDiskFilesAreRaw: our own disk files are raw for everybody who looks at them later,
// including one that came with a volume.
func TestOwnDiskFilesAreRaw(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "image.raw", filetest.Block('i', guestSize), 0)
	work, volume, brought := t.TempDir(), t.TempDir(), t.TempDir()
	filetest.Put(t, brought, PersistentName, nil, guestSize)
	for _, opt := range []Options{
		{WorkDir: work}, {PersistentDir: volume}, {PersistentDir: brought},
		{PersistentDir: t.TempDir(), Mode: CopyOnWrite},
	} {
		inst, _ := start(t, path, opt)
		guestWrites(t)["qcow2"](inst)
		if inst.copies != nil {
			inst.copies.done.Wait()
		}
		require.NoError(t, inst.Close())
		info := testtool.Must(image.Inspect(inst.path, image.Options{}))(t)
		require.True(t, info.Servable, info.Reason)
		require.Equal(t, image.SourceServed, info.FormatSource)

		inst, _ = start(t, path, opt)
		require.Equal(t, []byte("QFI\xfb"), filetest.ReadAll(t, inst, 4))
		require.NoError(t, inst.Close())
	}
}

// TestBroughtDiskIsNotProbed: a guest may have written the beginning of a disk that came with a
// volume. Its place says that it is raw.
func TestBroughtDiskIsNotProbed(t *testing.T) {
	for looks, write := range guestWrites(t) {
		volume := t.TempDir()
		path := filetest.Put(t, volume, PersistentName, nil, guestSize)
		f := testtool.Must(rawfile.Open(path, rawfile.Options{}))(t)
		write(f)
		want := filetest.ReadAll(t, f, guestSize)
		require.NoError(t, f.Close())
		for range 2 {
			inst := testtool.Must(Open(t.Context(), nil, Options{PersistentDir: volume}))(t, looks)
			require.True(t, bytes.Equal(want, filetest.ReadAll(t, inst, guestSize)), looks)
			require.NoError(t, inst.Close())
		}
	}
}

// TestConvertedDiskIsRaw: a disk in a qcow2 image may begin like another format. Its raw copy has
// the mark.
func TestConvertedDiskIsRaw(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "in.raw", []byte("LUKS\xba\xbe\x00\x02"), guestSize)
	filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", "qcow2", "in.raw", "a.qcow2")
	out := filepath.Join(dir, "out.raw")
	require.NoError(t, image.Convert(t.Context(), openGood(t, filepath.Join(dir, "a.qcow2")), out,
		true, nil))
	require.Equal(t, image.SourceServed, openGood(t, out).Info().FormatSource)

	// A copy that looks like a disk gets no mark, so that another image may be written over it.
	plain := filetest.Put(t, dir, "plain.raw", nil, guestSize)
	require.NoError(t, image.Convert(t.Context(), openGood(t, plain), out, true, nil))
	require.Equal(t, image.SourceContent, openGood(t, out).Info().FormatSource)

	// The mark of a killed process does not stay on the new file.
	left := testtool.Must(os.OpenFile(out+durable.PartialSuffix, os.O_RDWR|os.O_CREATE, 0o644))(t)
	require.NoError(t, left.Truncate(4096))
	require.NoError(t, image.MarkRaw(left, ""))
	require.NoError(t, left.Close())
	require.NoError(t, image.Convert(t.Context(), openGood(t, plain), out, true, nil))
	require.Equal(t, image.SourceContent, openGood(t, out).Info().FormatSource)
}

// TestServeRawUntilKilled is the process that TestServedRawSurvivesKill kills.
func TestServeRawUntilKilled(t *testing.T) {
	path := os.Getenv(killedImage)
	if path == "" || os.Getenv(killedMode) != string(CopyNone) {
		t.Skip("is run by TestServedRawSurvivesKill")
	}
	inst, _ := start(t, path, Options{Mode: CopyNone, WorkDir: os.Getenv(killedDir)})
	guestWrites(t)["luks"](inst)
	require.NoError(t, unix.Kill(os.Getpid(), unix.SIGKILL))
}

func TestServedRawSurvivesKill(t *testing.T) {
	dir := t.TempDir()
	path := filetest.Put(t, dir, "a.raw", nil, guestSize)
	child := exec.Command(os.Args[0], "-test.run=^TestServeRawUntilKilled$")
	child.Env = append(os.Environ(),
		killedImage+"="+path, killedDir+"="+t.TempDir(), killedMode+"="+string(CopyNone),
		"TMPDIR="+t.TempDir()) // it cannot remove what it leaves there
	out, err := child.CombinedOutput()
	require.ErrorContains(t, err, "killed", "%s", out)
	inst := startScanned(t, dir, "a.raw", 1, Options{WorkDir: t.TempDir(), Mode: CopyOnWrite})
	require.Equal(t, []byte("LUKS\xba\xbe"), filetest.ReadAll(t, inst, 6))
}
