package unpack

import (
	"archive/tar"
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
)

// vmdkOf makes an image as VMware does: the tables follow the grains, which have these sectors.
func vmdkOf(t testing.TB, disk []byte, change func(head []byte), sectors ...int) []byte {
	le := binary.LittleEndian
	head := make([]byte, 512)
	copy(head, vmdkMagic)
	le.PutUint32(head[4:], 3)
	le.PutUint32(head[8:], vmdkStream|1)
	le.PutUint64(head[12:], uint64(len(disk)/512))
	le.PutUint64(head[20:], 128)
	le.PutUint64(head[28:], 1)
	le.PutUint64(head[36:], 20)
	le.PutUint32(head[44:], 512)
	le.PutUint64(head[56:], vmdkAtEnd)
	le.PutUint64(head[64:], 128)
	copy(head[73:], "\n \r\n")
	le.PutUint16(head[77:], vmdkDeflate)
	text := make([]byte, 20*512)
	copy(text, "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n"+
		"createType=\"streamOptimized\"\nRDONLY 1 SPARSE \"x.vmdk\"\n")
	if change != nil {
		change(head)
		change(text)
	}
	b := append(append(head, text...), make([]byte, 107*512)...)
	pad := func() {
		b = append(b, make([]byte, (512-len(b)%512)%512)...)
	}
	marker := func(sectors, kind int) {
		b = le.AppendUint64(b, uint64(sectors))
		b = le.AppendUint32(le.AppendUint32(b, 0), uint32(kind))
		pad()
	}
	table := make([]byte, 2048)
	for _, sector := range sectors {
		if n := sector / 128; n < 512 { // of one table; what is wrong elsewhere is refused before
			le.PutUint32(table[n*4:], uint32(len(b)/512))
		}
		grain := make([]byte, 64<<10)
		if sector*512 < len(disk) {
			copy(grain, disk[sector*512:])
		}
		var z bytes.Buffer
		w := zlib.NewWriter(&z)
		require.NoError(t, testtool.Err(w.Write(grain)))
		require.NoError(t, w.Close())
		b = le.AppendUint32(le.AppendUint64(b, uint64(sector)), uint32(z.Len()))
		b = append(b, z.Bytes()...)
		pad()
	}
	directory := make([]byte, 512)
	marker(4, vmdkGT)
	le.PutUint32(directory, uint32(len(b)/512))
	b = append(b, table...)
	marker(1, vmdkGD)
	le.PutUint64(head[56:], uint64(len(b)/512))
	b = append(b, directory...)
	marker(1, vmdkFooter)
	b = append(b, head...)
	marker(0, vmdkEnd)
	return b
}

// TestVMDK reads what VMware's programs write, and what is in their appliances.
func TestVMDK(t *testing.T) {
	disk := make([]byte, 1<<20+512)
	copy(disk, rawDisk(70<<10))
	copy(disk[1<<20:], "the end")
	image := vmdkOf(t, disk, nil, 0, 128, 2048)
	ova := packtest.Tar(t, packtest.File{Name: "box.ovf", Data: []byte("<?xml version='1.0'?>\n")},
		packtest.File{Name: "box.mf", Data: []byte("SHA256(box.ovf)= 00\n")},
		packtest.File{Name: "box-disk1.vmdk", Data: image})
	for name, data := range map[string][]byte{"a.vmdk": image, "a.vmdk.gz": packtest.Gzip(t, image),
		"box with gzip": packtest.Tar(t, packtest.File{Name: "box.ovf", Data: []byte("<?xml?>")},
			packtest.File{Name: "box-disk1.vmdk.gz", Data: packtest.Gzip(t, image)}),
		"xz in an archive": packtest.Tar(t,
			packtest.File{Name: "a.vmdk.xz", Data: packtest.Xz(image)}),
		"box.ova": ova, "box.ova.gz": packtest.Gzip(t, ova),
		"a.vmdk.gz.gz": packtest.Gzip(t, packtest.Gzip(t, image))} {
		c, got := testtool.Must2(all(name, data, Options{}))(t, name)
		require.True(t, bytes.Equal(disk, got), name)
		want := "a.raw"
		if strings.HasPrefix(name, "box") {
			want = "box-disk1.raw"
		}
		require.Equal(t, want, c.Name)
	}
	// What follows the last grain of a full disk is read, too: an upload must have a reader for it.
	disk = disk[:128<<10]
	from := bytes.NewReader(vmdkOf(t, disk, nil, 0, 128))
	got := testtool.Must(io.ReadAll(testtool.Must(Open("a.vmdk", from, -1, Options{}))(t)))(t)
	require.True(t, bytes.Equal(disk, got))
	require.Zero(t, from.Len())
	var empty *Content
	empty, got = testtool.Must2(all("a.vmdk", vmdkOf(t, make([]byte, 2<<20), nil), Options{}))(t)
	require.Equal(t, make([]byte, 2<<20), got)
	require.Equal(t, "a.raw", empty.Name)
	text := bytes.Repeat([]byte("text of a disk\n\n"), 4096)
	_, got = testtool.Must2(all("a.ova", packtest.Tar(t, packtest.File{Name: "a.vmdk",
		Data: vmdkOf(t, text, nil, 0)}), Options{}))(t, "a VMDK image is a disk, whatever is on it")
	require.Equal(t, text, got)
}

// TestVMDKOfQEMU compares the disk with what qemu-img makes of the image that it has written.
func TestVMDKOfQEMU(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for i, size := range []int{512, 64 << 10, 3<<20 + 512, 80 << 20} {
		disk := make([]byte, size)
		for off := 0; off < size; off += 7 << 20 {
			copy(disk[off:], rawDisk(min(200<<10*(i+1), size-off)))
		}
		copy(disk[size-512:], "the end")
		require.NoError(t, os.WriteFile(path("raw"), disk, 0o644))
		out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O",
			"vmdk", "-o", "subformat=streamOptimized", path("raw"), path("vmdk")).CombinedOutput()
		require.NoError(t, err, "%s", out)
		image := filetest.Content(t, path("vmdk"))
		_, got := testtool.Must2(all("a.vmdk", image, Options{}))(t)
		require.True(t, bytes.Equal(disk, got), size)
		if size < 3<<20 {
			continue
		}
		for _, n := range []int{len(image) - 512, len(image) - 64<<10, len(image) / 2} {
			_, got, err := all("a.vmdk", image[:n/512*512], Options{})
			require.True(t, err != nil || n == len(image)-512 && bytes.Equal(disk, got),
				"%d of %d bytes, of which the last ones may be padding", n, len(image))
		}
	}
	for _, form := range []string{"monolithicSparse", "twoGbMaxExtentSparse"} {
		out, err := exec.CommandContext(t.Context(), "qemu-img", "create", "-f", "vmdk", "-o",
			"subformat="+form, path(form), "1M").CombinedOutput()
		require.NoError(t, err, "%s", out)
		image := filetest.Content(t, path(form))
		c := testtool.Must(Open("a.vmdk", bytes.NewReader(image), -1, Options{}))(t)
		require.Empty(t, c.Formats, "it is left to who converts it")
	}
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestMemoryOfVMDKTables: a directory of the largest disk is small.
func TestMemoryOfVMDKTables(t *testing.T) {
	image := vmdkOf(t, make([]byte, 1<<20), func(p []byte) {
		if string(p[:4]) == vmdkMagic {
			binary.LittleEndian.PutUint64(p[12:], 64<<40/512)
			binary.LittleEndian.PutUint64(p[56:], 32)
			binary.LittleEndian.PutUint64(p[64:], 1<<20)
		}
	})
	file := io.MultiReader(bytes.NewReader(image[:16<<10]), io.LimitReader(zeros{}, 600<<20))
	grew := testtool.HeapGrowth(t, func() {
		_, err := Open("a.vmdk", file, -1, Options{})
		require.ErrorContains(t, err, "continues after the end")
	})
	require.Less(t, grew, int64(40<<20))
}

// TestNothingIsReadForLong: what is no part of the disk ends soon. While it is read, nobody hears
// that the reading should end, and some bytes may be terabytes of it.
func TestNothingIsReadForLong(t *testing.T) {
	le := binary.LittleEndian
	image := vmdkOf(t, make([]byte, 1<<20), nil)
	late := bytes.Clone(image)
	le.PutUint64(late[64:], 1<<32)
	marker := make([]byte, 512)
	le.PutUint32(marker[12:], vmdkGT)
	large := func(kind byte) []byte { // the header of a file that says that it has 8 GiB
		p := packtest.Tar(t, packtest.File{Name: "a.raw", Type: kind, Link: "b"})[:512]
		copy(p[124:136], "77777777777\x00")
		copy(p[148:156], "        ") // its checksum, of itself as spaces
		sum := 0
		for _, b := range p {
			sum += int(b)
		}
		copy(p[148:156], fmt.Sprintf("%06o\x00 ", sum))
		return p
	}
	for name, in := range map[string]io.Reader{
		"late grains":  io.MultiReader(bytes.NewReader(late), zeros{}),
		"many markers": io.MultiReader(bytes.NewReader(image[:128<<9]), &endless{data: marker}),
		"unknown kind": io.MultiReader(bytes.NewReader(large('Z')), zeros{}),
	} {
		far := errors.New("read too far")
		c, err := Open("a", io.MultiReader(io.LimitReader(in, 200<<20), iotest.ErrReader(far)),
			-1, Options{})
		if err == nil {
			_, err = io.Copy(io.Discard, c)
		}
		require.ErrorAs(t, err, new(*Error), name)
	}
	raw := rawDisk(4096)
	_, got := testtool.Must2(all("a.tar", append(large(tar.TypeLink), packtest.Tar(t,
		packtest.File{Name: "b.raw", Data: raw})...), Options{}))(t, "a link has no content")
	require.Equal(t, raw, got)
}

// TestVMDKRefused: what a hostile or damaged image says is not believed.
func TestVMDKRefused(t *testing.T) {
	disk := rawDisk(1 << 20)
	le := binary.LittleEndian
	header := func(f func(head []byte)) func([]byte) {
		return func(p []byte) {
			if string(p[:4]) == vmdkMagic {
				f(p)
			}
		}
	}
	text := func(f func(text []byte)) func([]byte) {
		return func(p []byte) {
			if string(p[:4]) != vmdkMagic {
				f(p)
			}
		}
	}
	good := vmdkOf(t, disk, nil, 0, 128, 256)
	full := vmdkOf(t, disk, nil, 0, 1920)
	damaged := bytes.Clone(good)
	damaged[128*512+200] ^= 1
	for name, c := range map[string]struct {
		image []byte
		want  string
	}{
		"cut":                     {good[:len(good)-512], "middle of its vmdk"},
		"cut in a grain":          {good[:128*512+3000], "middle of its vmdk"},
		"more":                    {append(bytes.Clone(good), "more"...), "continues after"},
		"cut behind a full disk":  {full[:len(full)-512], "middle of its vmdk"},
		"more behind a full disk": {append(bytes.Clone(full), "more"...), "continues after"},
		"too many grains": {vmdkOf(t, disk, header(func(p []byte) {
			le.PutUint64(p[12:], 1<<37)
			le.PutUint64(p[20:], 8)
		})), "too many to check"},
		"damaged":        {damaged, "the grain of sector 0"},
		"out of order":   {vmdkOf(t, disk, nil, 128, 0), "not in the order"},
		"twice":          {vmdkOf(t, disk, nil, 0, 0), "not in the order"},
		"past the end":   {vmdkOf(t, disk, nil, 2048), "a grain is for sector 2048"},
		"within a grain": {vmdkOf(t, disk, nil, 3), "a grain is for sector 3"},
		"an exabyte": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint64(p[12:], 1<<51) })),
			"no size of a disk"},
		"no size": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint64(p[12:], 0) })),
			"no size of a disk"},
		"huge grains": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint64(p[20:], 1<<40) })),
			"grains have"},
		"odd grains": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint64(p[20:], 100) })),
			"grains have"},
		"other tables": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint32(p[44:], 1<<31) })),
			"tables have"},
		"no deflate": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint16(p[77:], 9) })),
			"compression 9"},
		"as a text": {vmdkOf(t, disk, header(func(p []byte) { copy(p[73:], "\n \n\n") })), "text"},
		"a directory that loops": {vmdkOf(t, disk, header(func(p []byte) {
			le.PutUint64(p[56:], 1)
		})), "order that cannot be read"},
		"a directory among grains": {vmdkOf(t, disk, header(func(p []byte) {
			le.PutUint64(p[56:], 500)
		})), "grain directory at sector 500"},
		"a descriptor elsewhere": {vmdkOf(t, disk, header(func(p []byte) {
			le.PutUint64(p[28:], 1<<63)
		})), "descriptor has"},
		"a version": {vmdkOf(t, disk, header(func(p []byte) { le.PutUint32(p[4:], 7) })),
			"version 7"},
		"a parent": {vmdkOf(t, disk, text(func(p []byte) {
			copy(p[bytes.Index(p, []byte("ffffffff")):], "12345678")
		})), "its parent"},
		"no extent": {vmdkOf(t, disk, text(func(p []byte) { clear(p) })), "a part of a disk"},
		"two extents": {vmdkOf(t, disk, text(func(p []byte) {
			copy(p[200:], "\nRW 1 SPARSE \"y.vmdk\"\n")
		})), "one of 2 files"},
	} {
		require.ErrorContains(t, testtool.Err2(all("a.vmdk", c.image, Options{})), c.want, name)
	}
}

// FuzzVMDK: anything is read or refused, without a panic, and never more than it says.
func FuzzVMDK(f *testing.F) {
	f.Add(vmdkOf(f, rawDisk(200<<10), nil, 0, 128))
	f.Add(vmdkOf(f, rawDisk(200<<10), func(p []byte) {
		if string(p[:4]) == vmdkMagic {
			binary.LittleEndian.PutUint64(p[56:], 21)
		}
	}, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) < 512 || !isVMDKStream(data) {
			return
		}
		size := binary.LittleEndian.Uint64(data[12:])
		if size > 1<<14 {
			return // many zeros take long
		}
		_, got, err := all("a.vmdk", data, Options{})
		if err == nil && uint64(len(got)) != size*512 {
			t.Fatalf("%d bytes of %d", len(got), size*512)
		}
	})
}

// TestVMDKsInEachOther: each has a decoder, so a hostile file must not have any number of them.
func TestVMDKsInEachOther(t *testing.T) {
	image := rawDisk(64 << 10)
	for i := range 4 {
		grains := make([]int, len(image)>>16)
		for g := range grains {
			grains[g] = g * 128
		}
		image = vmdkOf(t, image, nil, grains...)
		image = append(image, make([]byte, -len(image)&(64<<10-1))...)
		_, _, err := all("a.vmdk", image, Options{})
		if i < MaxNested {
			require.NoError(t, err)
		} else if i > MaxNested {
			require.ErrorContains(t, err, "more than 2")
		}
	}
}

// TestVMDKTables: an image whose tables say something else than the markers of its grains is not
// read, whether the tables come before the grains, as QEMU writes them, or behind them.
func TestVMDKTables(t *testing.T) {
	le := binary.LittleEndian
	disk := rawDisk(1 << 20)
	whole := vmdkOf(t, disk, nil, 0, 128, 512)
	end := len(whole)
	const footer, directory, table = 512 + 512, 3*512 + 512, 4*512 + 512 + 2048
	swap := func(at, a, b int) func(p []byte) []byte {
		return func(p []byte) []byte {
			x, y := le.Uint32(p[at+4*a:]), le.Uint32(p[at+4*b:])
			le.PutUint32(p[at+4*a:], y)
			le.PutUint32(p[at+4*b:], x)
			return p
		}
	}
	put := func(at int, v uint32) func(p []byte) []byte {
		return func(p []byte) []byte { le.PutUint32(p[at:], v); return p }
	}
	type change = func(p []byte) []byte
	behind := map[string]change{
		"two grains exchanged":       swap(end-table, 0, 1),
		"a grain at another place":   swap(end-table, 1, 2),
		"a grain left out":           put(end-table, 0),
		"a grain that never came":    put(end-table+5*4, 200),
		"a grain that is elsewhere":  put(end-table+4, 5),
		"a table that is elsewhere":  put(end-directory, 128),
		"no table":                   put(end-directory, 0),
		"a directory elsewhere":      put(end-footer+56, 128),
		"another size in the footer": put(end-footer+12, 1024),
		"a footer that is none":      put(end-footer, 0),
		"no footer": func(p []byte) []byte {
			return append(p[:end-footer-512], make([]byte, 512)...)
		},
		"another table behind the footer": func(p []byte) []byte {
			return slices.Concat(p[:end-512], p[end-table-512:end-table+2048], p[end-512:])
		},
	}
	refused := func(t *testing.T, image []byte, f change) {
		t.Helper()
		_, got, err := all("a.vmdk", f(bytes.Clone(image)), Options{})
		require.Error(t, err)
		require.NotEqual(t, len(disk), len(got))
	}
	for name, f := range behind {
		t.Run(name, func(t *testing.T) { refused(t, whole, f) })
	}
	_, got := testtool.Must2(all("a.vmdk", whole, Options{}))(t)
	require.Len(t, got, len(disk))
	// A grain that is said to be zeros, where the header allows it, is as one that is not there.
	flags := func(p []byte) []byte {
		for _, at := range []int{0, end - footer} {
			le.PutUint32(p[at+8:], le.Uint32(p[at+8:])|1<<2)
		}
		return p
	}
	refused(t, whole, put(end-table+5*4, 1))
	_, _, err := all("a.vmdk", put(end-table+5*4, 1)(flags(bytes.Clone(whole))), Options{})
	require.NoError(t, err)

	testtool.Need(t, "qemu-img")
	raw, path := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "vmdk")
	require.NoError(t, os.WriteFile(raw, disk, 0o644))
	out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O", "vmdk",
		"-o", "subformat=streamOptimized", raw, path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	before := filetest.Content(t, path)
	at := int(le.Uint32(before[le.Uint64(before[56:])*512:])) * 512
	for _, f := range []change{swap(at, 0, 1), put(at, 0), put(at+100*4, 129),
		put(int(le.Uint64(before[56:])*512), 0)} {
		refused(t, before, f)
	}
	_, got = testtool.Must2(all("a.vmdk", before, Options{}))(t)
	require.True(t, bytes.Equal(disk, got))
}
