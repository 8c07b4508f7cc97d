package image

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/words"
)

func TestDetectByMagic(t *testing.T) {
	for _, m := range magics {
		head, tail := make([]byte, headSize), make([]byte, tailSize)
		if m.offset >= 0 {
			copy(head[m.offset:], m.data)
		} else {
			copy(tail[len(tail)+m.offset:], m.data)
		}
		found := detect(head, tail)
		require.NotNil(t, found, "%s", m.title)
		require.Equal(t, m.format, found.format, "%s", m.title)
		if m.format == FormatQcow2 {
			continue
		}
		e := found.refuse("disk.raw", useFound)
		require.Equal(t, "is "+m.title, e.Reason)
		require.NotEmpty(t, e.Action, "%s", m.title)
		// With one bit less it is unknown.
		if m.offset >= 0 {
			head[m.offset] ^= 0x80
		} else {
			tail[len(tail)+m.offset] ^= 0x80
		}
		require.Nil(t, detect(head, tail), "%s", m.title)
	}
}

// TestDetectDownloads: what a transfer leaves in the place of a disk is recognised, also under the
// name of a raw disk. What a raw disk may begin with is not.
func TestDetectDownloads(t *testing.T) {
	for text, format := range map[string]Format{
		"\n\ufeff <!-- a proxy --><p>f\xfcr": "html", "<?xml version='1.0'?><Error/>": "html",
		"<Error>": "html", "{\n \"a\": 1}": "json", "{}": "json", "[\n{}]": "json",
		"--b\r\nContent-disposition: form-data\r\n\r\n\x00\x01": "form",
		"\x50\x2a\x4d\x18\x01\x00\x00\x00a\x28\xb5\x2f\xfd\x00": "zstd",
		"\x5f\x2a\x4d\x18\xff\xff\x00\x00":                      "zstd",
		"HTTP/1.1 404 Not Found\r\n":                            "http",
	} {
		m := detect([]byte(text), nil)
		require.NotNil(t, m, text)
		require.Equal(t, format, m.format, text)
		require.Error(t, m.refuse("disk.raw", useNamed), text)
	}
	for _, disk := range []string{"{\"settings\": 1}\x00", "<\x00", "<1", "{", "[", "[1", "",
		"--\r\n", "\x60\x2a\x4d\x18\x01\x00\x00\x00", "\x50\x2a\x4d\x18\x01\x00\x00\x00abcdef"} {
		require.Nil(t, detect([]byte(disk), nil), "%q", disk)
	}
}

// TestWrappedSayWhatToDo: the command for a wrapped file has a name for the disk in it.
func TestWrappedSayWhatToDo(t *testing.T) {
	for name, want := range map[string]string{"a.tar.gz": "a.qcow2", "a.TGZ": "a.qcow2",
		"tar.gz": "tar.qcow2", "a.raw.gz": "a.raw", "a.qcow2.XZ": "a.qcow2", "gz": "gz.qcow2",
		"a b.gz": "'a b.qcow2'"} {
		e := detect([]byte("\x1f\x8b\x08"), nil).refuse(name, useNamed)
		require.Contains(t, e.Action, "kubevirt-disk convert "+words.Shell(name)+" "+want+"\"")
	}
}

// TestOCIArchiveIsNoDisk: an archive of a container image is not served as a file, but by its name.
func TestOCIArchiveIsNoDisk(t *testing.T) {
	head := make([]byte, headSize)
	copy(head[257:], "ustar")
	e := detect(head, nil).refuse("vms/a.oci-archive", useNamed)
	require.Contains(t, e.Reason, "an OCI archive")
	require.Contains(t, e.Action, "name it as an image, oci-archive:vms/a.oci-archive")
}

// The first bytes of a raw disk are not a format.
func TestDetectLeavesRawDisksAlone(t *testing.T) {
	mbr := make([]byte, headSize)
	copy(mbr, "\xeb\x63\x90")
	copy(mbr[510:], "\x55\xaa")
	copy(mbr[512:], "EFI PART")
	ext4 := make([]byte, headSize)
	copy(ext4[1080:], "\x53\xef")
	squashfs := append([]byte("hsqs"), make([]byte, headSize-4)...)
	lvm := make([]byte, headSize)
	copy(lvm[512:], "LABELONE")
	for name, head := range map[string][]byte{"mbr": mbr, "ext4": ext4, "squashfs": squashfs,
		"lvm": lvm, "zeros": make([]byte, headSize), "empty": nil} {
		require.Nil(t, detect(head, make([]byte, min(len(head), tailSize))), name)
	}
}

// Real files of other programs, under a raw disk's name.
func TestForeignFormatsFromTheirTools(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(t.TempDir(), "in.raw")
	require.NoError(t, exec.Command("truncate", "-s", "1M", raw).Run())
	for _, format := range []string{"vmdk", "vhdx", "vpc", "vdi", "qed", "parallels"} {
		filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", format, raw, format+".raw")
	}
	filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", "vpc", "-o", "subformat=fixed", raw,
		"vpc-fixed.img")
	filetest.QemuImg(t, dir, "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=monolithicFlat",
		raw, "flat.img")
	filetest.Put(t, dir, "luks.raw", []byte("LUKS\xba\xbe\x00\x01"), 1<<20)
	want := map[string]Format{"vpc.raw": "vhd", "vpc-fixed.img": "vhd", "flat.img": "vmdk",
		"luks.raw": "luks", "vmdk.raw": "vmdk", "vhdx.raw": "vhdx", "vdi.raw": "vdi",
		"qed.raw": "qed", "parallels.raw": "parallels"}
	for _, pack := range [][]string{{"gzip"}, {"xz"}, {"bzip2"}, {"zstd", "-q"}} {
		if _, err := exec.LookPath(pack[0]); err != nil {
			continue
		}
		out := testtool.Must(exec.Command(pack[0], append(pack[1:], "-c", raw)...).Output())(t)
		filetest.Put(t, dir, pack[0]+".img", out, (int64(len(out))+511)/512*512)
		want[pack[0]+".img"] = Format(pack[0])
	}
	if _, err := exec.LookPath("tar"); err == nil {
		require.NoError(t, exec.Command("tar", "-C", filepath.Dir(raw), "-cf",
			filepath.Join(dir, "app.ova"), "in.raw").Run())
		want["app.ova"] = "tar"
	}
	for name, format := range want {
		info := testtool.Must(Inspect(filepath.Join(dir, name), Options{}))(t, name)
		require.Equal(t, format, info.Format, name)
		require.False(t, info.Servable, name)
	}
	reasons := scanErrors(t, dir)
	require.Contains(t, reasons["vmdk.raw"], `"kubevirt-disk convert vmdk.raw vmdk.qcow2"`)
	require.Contains(t, reasons["flat.img"],
		`"qemu-img convert -f vmdk -O qcow2 flat.img flat.qcow2"`)
	require.Contains(t, reasons["vhdx.raw"], `"kubevirt-disk convert vhdx.raw vhdx.qcow2"`)
	require.Contains(t, reasons["vpc-fixed.img"], "kubevirt-disk convert ")
	require.Contains(t, reasons["app.ova"], "OVA")
	for name := range want {
		require.Contains(t, reasons, name)
	}
}

func TestUnknownFilesSayWhatToDo(t *testing.T) {
	for _, c := range []struct{ name, head, want string }{
		{"notes.txt", "buy milk\n", "is a text file"},
		{"disk", "\x01\x02\x03", "name it .raw"},
		{"disk.qcow2", "\x01\x02\x03", "does not begin with a qcow2 header"},
		{"disk.raw", "", "is empty"},
		{"grüße.txt", "grüße\n", "is a text file"},
		{"8 bits", "gr\xfc\xdfe\n", "is a text file"},
		{"UTF-16", "\xff\xfef\x00\xfc\x00r\x00 \x00a\x00", "is a text file"},
		{"cut in a character", strings.Repeat("x", 4095) + "\xe2", "is a text file"},
		{"colours", "\x1b[1mboot\x1b[0m\n", "is a text file"},
	} {
		require.Contains(t, refuseUnknown(c.name, []byte(c.head), useFound).Explain(), c.want,
			c.name)
	}
}

// The image that names a backing file needs it. The message must not advise to remove it, or to
// name another image.
func TestBackingFilesSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	filetest.Put(t, dir, "program.raw", []byte("\x7fELF"), 4096)
	filetest.Put(t, dir, "packed.raw", []byte("\x1f\x8b\x08"), 4096)
	require.NoError(t, os.Symlink("program.raw", filepath.Join(dir, "link.raw")))
	for base, want := range map[string]string{
		"program.raw": "put a disk image in its place, or rebase the image that names it",
		"packed.raw":  "with \"kubevirt-disk convert packed.raw packed.raw.qcow2\" before",
		"link.raw":    "put the file itself there",
		"missing.raw": "does not exist; add it to the directory of the image",
	} {
		filetest.OverlayOn(t, dir, "top.qcow2", base, "raw")
		_, err := Open(filepath.Join(dir, "top.qcow2"), Options{})
		require.ErrorContains(t, err, want)
		require.Contains(t, scanErrors(t, dir)["top.qcow2"], want)
	}
}

func TestShellWord(t *testing.T) {
	for in, want := range map[string]string{"a.raw": "a.raw", "a b": "'a b'", "it's": `'it'\''s'`,
		"-f": "'-f'", "$(x)": "'$(x)'", "": "''",
		"a\x1b[31m\n'b'": `$'a\x1b[31m\n\'b\''`, "\x9b": `$'\x9b'`} {
		require.Equal(t, want, words.Shell(in))
	}
}

func FuzzDetect(f *testing.F) {
	f.Add([]byte("QFI\xfb"), []byte("conectix"), "disk.raw")
	f.Add([]byte(strings.Repeat("\x00", 257)+"ustar"), []byte{}, "x.ova")
	f.Add([]byte{}, []byte{}, "")
	f.Fuzz(func(t *testing.T, head, tail []byte, name string) {
		var e *Error
		if m := detect(head, tail); m != nil {
			e = m.refuse(name, useNamed)
		} else {
			e = refuseUnknown(name, head, useFound)
		}
		if e.Reason == "" || e.Action == "" {
			t.Fatalf("nothing is said about %q", head)
		}
		if strings.ContainsAny(words.Name(name), "\n\x1b\x00") {
			t.Fatalf("the name %q reaches the terminal as it is", name)
		}
	})
}

// An intact image is not called damaged, and neither is one that cannot be read.
func TestQcow2ThatIsNotServed(t *testing.T) {
	dir := t.TempDir()
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "good.qcow2", "1M")
	good := filetest.Content(t, filepath.Join(dir, "good.qcow2"))
	edited := func(name string, at int, to byte) {
		p := bytes.Clone(good)
		p[at] = to
		filetest.Put(t, dir, name, p, 0)
	}
	edited("aes.qcow2", 35, 1)
	edited("corrupt.qcow2", 79, 2)
	edited("damaged.qcow2", 23, 99) // cluster_bits
	edited("data.qcow2", 79, 4)
	edited("first.qcow2", 7, 1)
	require.Equal(t, map[string]string{
		"aes.qcow2":     `cannot be served: the image is encrypted (AES); decrypt it with "qemu-img convert": a key cannot be given to the server`,
		"corrupt.qcow2": `cannot be served: the image is marked corrupt (incompatible feature bit 1); repair it with "qemu-img check -r all"`,
		"damaged.qcow2": `is not valid: cluster_bits is 99, outside 9 to 21; check it with "qemu-img check", and fetch or build it again`,
		"data.qcow2":    `cannot be served: the image keeps its data in an external file (incompatible feature bit 2); convert it with "qemu-img convert -O qcow2"`,
		"first.qcow2":   `cannot be served: its version 1 is not supported, and versions 2 and 3 are; convert it with "qemu-img convert -f qcow -O qcow2"`,
	}, scanErrors(t, dir))
	var unreadable *Error
	err := refuseQcow2("disk.qcow2", fmt.Errorf("reading the header: %w", unix.EIO))
	require.ErrorAs(t, err, &unreadable)
	require.Equal(t, "cannot be read: reading the header: input/output error", unreadable.Explain())
	require.True(t, unreadable.unreadable())
}
