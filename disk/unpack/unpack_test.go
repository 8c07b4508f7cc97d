package unpack

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// rawDisk is data that looks like a raw disk.
func rawDisk(n int) []byte {
	p := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(p[:min(n, 300<<10)])
	copy(p, "\xeb\x63")
	return p
}

// qcow2Head begins like a qcow2 image.
func qcow2Head(n int) []byte { return append([]byte("QFI\xfb\x00\x00\x00\x03"), rawDisk(n)...) }

func all(name string, data []byte, opt Options) (*Content, []byte, error) {
	c, err := Open(name, bytes.NewReader(data), int64(len(data)), opt)
	if err != nil {
		return nil, nil, err
	}
	content, err := io.ReadAll(c)
	return c, content, errors.Join(err, c.Close())
}

// TestEndIsChecked: what is wrong behind a disk in an archive is found, too, if the last read of
// the disk has filled its buffer, as one of the size that the archive tells does.
func TestEndIsChecked(t *testing.T) {
	raw := rawDisk(1 << 20)
	one := packtest.File{Name: "a.raw", Data: raw}
	damaged := packtest.Gzip(t, packtest.Tar(t, one))
	damaged[len(damaged)-5] ^= 1 // its checksum
	for want, data := range map[string][]byte{"cannot be decompressed": damaged,
		"two disks": packtest.Tar(t, one, packtest.File{Name: "b.raw", Data: raw})} {
		c := testtool.Must(Open("a.tar", bytes.NewReader(data), -1, Options{}))(t)
		got := make([]byte, c.Size)
		require.NoError(t, testtool.Err(io.ReadFull(c, got)))
		require.True(t, bytes.Equal(raw, got))
		for range 2 {
			require.ErrorContains(t, testtool.Err(c.Read(got)), want)
		}
	}
}

// TestOpen takes off each wrapping, alone and within another one.
func TestOpen(t *testing.T) {
	testtool.Need(t, "xz", "bzip2", "zstd")
	raw, other := rawDisk(2<<20), qcow2Head(70<<10)
	pax := func(name string, data []byte) []byte { // as macOS packs
		return packtest.Tar(t, packtest.File{Name: "./._" + name, Data: rawDisk(512)},
			packtest.File{Name: "README.md", Data: []byte("# read me\n")},
			packtest.File{Name: "images", Type: tar.TypeDir},
			packtest.File{Name: "images/" + name, Data: data},
			packtest.File{Name: "images/SHA256SUMS", Data: []byte("0123  disk\n")},
			packtest.File{Name: "images/disk.sig", Data: rawDisk(512)},
			packtest.File{Name: ".hidden", Data: rawDisk(1 << 20)},
			packtest.File{Name: "link", Type: tar.TypeSymlink, Link: "/etc/passwd"})
	}
	half := len(raw) / 2
	xz := func(p []byte) []byte { return packtest.Tool(t, p, "xz", "-1") }
	bz := func(p []byte) []byte { return packtest.Tool(t, p, "bzip2") }
	for name, c := range map[string]struct {
		data, want []byte
		disk       string
		formats    string
	}{
		"disk.raw":          {raw, raw, "disk.raw", ""},
		"disk.raw.gz":       {packtest.Gzip(t, raw), raw, "disk.raw", "gzip"},
		"disk.qcow2.xz":     {xz(other), other, "disk.qcow2", "xz"},
		"dir/disk.img.bz2":  {bz(raw), raw, "disk.img", "bzip2"},
		"disk.raw.zst":      {packtest.Zstd(t, raw, 1<<20), raw, "disk.raw", "zstd"},
		"wrongly-named.iso": {packtest.Gzip(t, raw), raw, "wrongly-named.iso", "gzip"},
		"two.gz": {slices.Concat(packtest.Gzip(t, raw[:half]), packtest.Gzip(t, raw[half:])), raw,
			"two", "gzip"},
		"padded.gz": {append(packtest.Gzip(t, raw), make([]byte, 9<<10)...), raw, "padded",
			"gzip"},
		"two.xz":      {slices.Concat(xz(raw[:half]), xz(raw[half:])), raw, "two", "xz"},
		"padded.xz":   {append(xz(raw), make([]byte, 8)...), raw, "padded", "xz"},
		"two.bz2":     {slices.Concat(bz(raw[:half]), bz(raw[half:])), raw, "two", "bzip2"},
		"disk.tar":    {pax("a.qcow2", other), other, "a.qcow2", "tar"},
		"disk.tar.gz": {packtest.Gzip(t, pax("disk.raw", raw)), raw, "disk.raw", "gzip tar"},
		"disk.tar.xz": {xz(pax("no-extension", raw)), raw, "no-extension", "xz tar"},
		"disk.tbz2":   {bz(pax("small.img", raw[:4096])), raw[:4096], "small.img", "bzip2 tar"},
		"packed.tar":  {pax("a.qcow2.xz", xz(other)), other, "a.qcow2", "tar xz"},
		"absolute.tar": {packtest.Tar(t, packtest.File{Name: "/../../etc/a.raw", Data: raw}), raw,
			"a.raw", "tar"},
		"twice.gz": {packtest.Gzip(t, packtest.Gzip(t, raw)), raw, "twice", "gzip gzip"},
	} {
		t.Run(filepath.Base(name), func(t *testing.T) {
			got, content := testtool.Must2(all(name, c.data, Options{}))(t)
			require.True(t, bytes.Equal(c.want, content))
			require.Equal(t, c.disk, got.Name)
			require.Equal(t, c.formats, strings.Join(texts(got.Formats), " "))
			if !slices.Contains([]string{"", "tar"}, c.formats) &&
				!strings.HasSuffix(c.formats, " tar") {
				require.Equal(t, int64(-1), got.Size)
			} else {
				require.Equal(t, int64(len(c.want)), got.Size)
			}
		})
	}
}

func texts(all []image.Format) (out []string) {
	for _, f := range all {
		out = append(out, string(f))
	}
	return out
}

// TestRefused: what is wrong is said, and in the end no content passes for whole.
func TestRefused(t *testing.T) {
	testtool.Need(t, "xz", "bzip2")
	raw := rawDisk(2 << 20)
	xz := packtest.Tool(t, raw, "xz", "-1")
	bz := packtest.Tool(t, raw, "bzip2")
	file := func(name string, data []byte) packtest.File {
		return packtest.File{Name: name, Data: data}
	}
	two := packtest.Tar(t, file("x/a.raw", raw), file("README", []byte("text\n")),
		file("b.qcow2", qcow2Head(9000)))
	many := make([]packtest.File, 2000)
	for i := range many {
		many[i] = file(fmt.Sprint("etc/", i), []byte("text\n"))
	}
	one := packtest.Tar(t, file("a.raw", raw))
	more := strings.Repeat("more", 20)
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"cut gzip":           {packtest.Gzip(t, raw)[:200<<10], "middle of its gzip"},
		"cut xz":             {xz[:len(xz)-30], "middle of its xz"},
		"cut bzip2":          {bz[:len(bz)-30], "middle of its bzip2"},
		"garbage after gzip": {append(packtest.Gzip(t, raw), more...), "cannot be decompressed"},
		"garbage after xz":   {append(bytes.Clone(xz), more...), "cannot be decompressed"},
		"garbage after bz":   {append(bytes.Clone(bz), more...), "cannot be decompressed"},
		"two disks":          {two, `two disks, "a.raw" and "b.qcow2"`},
		"two disks, packed": {packtest.Tar(t, file("a.raw", raw),
			file("b.raw.gz", packtest.Gzip(t, raw))), `two disks, "a.raw" and "b.raw.gz"`},
		"three wrappings": {packtest.Gzip(t, packtest.Gzip(t, packtest.Gzip(t, raw))),
			"more than 2"},
		"three with tar":     {packtest.Gzip(t, packtest.Gzip(t, one)), "more than 2"},
		"packed in the tar":  {packtest.Gzip(t, packtest.Tar(t, file("a.xz", xz))), "more than 2"},
		"an archive of none": {packtest.Tar(t, file("README", []byte("text\n"))), "none of its 1"},
		"an empty archive":   {make([]byte, 10240), ""},
		"a root file system": {packtest.Tar(t, many...), "more than 1024 files"},
		"a link to a disk": {packtest.Tar(t, packtest.File{Name: "disk.raw", Type: tar.TypeSymlink,
			Link: "/dev/sda"}), `"disk.raw" in it is a link`},
		"a hard link": {packtest.Tar(t, packtest.File{Name: "disk.raw", Type: tar.TypeLink,
			Link: "/etc/shadow"}), "is a link"},
		"a VMDK in it": {packtest.Tar(t, file("box.ovf", []byte("<?xml?>")),
			file("box-disk1.qed", append([]byte("QED\x00"), raw...))), "qemu-img convert -f qed"},
		"much beside the disk": {packtest.Tar(t, file("a.raw", raw),
			file("x.txt", bytes.Repeat([]byte("text\n"), 14<<20))), "that are not a disk"},
		"a cut tar": {one[:len(one)-100<<10], "middle of its tar"},
		"a broken header": {append(bytes.Clone(one)[:len(one)-1024], rawDisk(4096)...),
			"damaged tar"},
		"more after tar": {append(bytes.Clone(one), make([]byte, 3<<20)...), "after the end"},
		"xz -9": {packtest.XzNeeding(raw, 28),
			"more than 16 MiB of memory are needed to decompress it; allow that with " +
				"--unpack-memory"},
		"xz of 4 GiB": {packtest.XzNeeding(raw, 40), "--unpack-memory"},
		"zstd --long": {append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 1, 0, 0}, raw...),
			"--unpack-memory"},
	} {
		t.Run(name, func(t *testing.T) {
			_, content, err := all(name, c.data, Options{})
			if c.want == "" {
				require.NoError(t, err)
				require.Equal(t, c.data, content, "zeros are a raw disk")
				return
			}
			require.ErrorContains(t, err, c.want)
			own, other := new(Error), new(image.Error)
			require.True(t, errors.As(err, &own) || errors.As(err, &other), "%v", err)
		})
	}
}

// TestMemory: the setting decides how much a decoder takes.
func TestMemory(t *testing.T) {
	raw := rawDisk(1 << 20)
	for code, memory := range map[byte]int64{24: 16 << 20, 26: 32 << 20, 28: 64 << 20} {
		data := packtest.XzNeeding(raw, code)
		_, got := testtool.Must2(all("x.xz", data, Options{Memory: memory}))(t)
		require.True(t, bytes.Equal(raw, got))
		_, _, err := all("x.xz", data, Options{Memory: memory - 1})
		require.ErrorContains(t, err, "memory")
	}
	_, _, err := all("x.xz", packtest.XzNeeding(raw, 30), Options{Memory: 1 << 40}) // 128 MiB
	require.ErrorContains(t, err, "more than 96 MiB")
	// Nothing is allocated for what is refused.
	var before, after runtime.MemStats
	huge := packtest.XzNeeding(raw, 37)
	runtime.ReadMemStats(&before)
	require.Error(t, testtool.Err2(all("x.xz", huge, Options{})))
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20))
}

// endless is the same data again and again, without an end.
type endless struct {
	data []byte
	came int64
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.data[e.came%int64(len(e.data)):])
	e.came += int64(n)
	return n, nil
}

// TestBombs: few bytes that are many zeros, again and again, as large as anybody likes. The disk
// has a limit: nothing is written behind it, little of the data is read, and none is kept.
func TestBombs(t *testing.T) {
	testtool.Need(t, "xz", "bzip2", "zstd")
	const limit = 16 << 20
	zeros := make([]byte, 4<<20)
	bz := packtest.Tool(t, zeros, "bzip2", "-9")
	for name, data := range map[string][]byte{"a.raw.bz2": bz,
		"a.raw.gz":      packtest.Tool(t, zeros, "gzip", "-9"),
		"a.raw.xz":      packtest.Tool(t, zeros, "xz", "-6"),
		"a.raw.zst":     packtest.Tool(t, zeros, "zstd", "-19"),
		"a.raw.bz2.gz":  packtest.Tool(t, bytes.Repeat(bz, 100), "gzip", "-9"),
		"a.raw.zst.bz2": packtest.Tool(t, packtest.Tool(t, zeros, "zstd", "-19"), "bzip2"),
		"a.raw.tar.bz2": packtest.Tool(t, packtest.Tar(t, packtest.File{Name: "a.raw",
			Data: make([]byte, 2*limit)}), "bzip2"),
	} {
		require.Less(t, len(data), 32<<10, name)
		to := testtool.Must(image.Scratch(t.TempDir()))(t)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		in := &endless{data: data}
		c := testtool.Must(Open(name, in, -1, Options{}))(t, name)
		a := image.NewArrival("a.raw", c.Size, to, image.ArrivalOptions{
			Options: image.Options{MaxVirtualSize: limit}})
		require.ErrorContains(t, a.Pass(t.Context(), c), "more than the limit", name)
		require.NoError(t, c.Close())
		runtime.ReadMemStats(&after)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(48<<20), name)
		require.Less(t, in.came, int64(256<<10), name)
		require.LessOrEqual(t, testtool.Must(to.File().Stat())(t).Size(), int64(limit), name)
		require.NoError(t, to.Finish(nil))
	}
}

// TestXzOfARM64: what this decoder lacks is said.
func TestXzOfARM64(t *testing.T) {
	testtool.Need(t, "xz")
	_, _, err := all("a.raw.xz", packtest.Tool(t, rawDisk(1<<20), "xz", "--arm64", "--lzma2"),
		Options{})
	require.ErrorContains(t, err, "ARM64")
	require.ErrorContains(t, err, "xz -d")
}

// TestXz9: "xz -9" needs a dictionary of 64 MiB.
func TestXz9(t *testing.T) {
	raw := rawDisk(4 << 20)
	data := packtest.Tool(t, raw, "xz", "-9")
	require.ErrorContains(t, testtool.Err2(all("x.xz", data, Options{})), "--unpack-memory")
	_, got := testtool.Must2(all("x.xz", data, Options{Memory: MaxMemory}))(t)
	require.True(t, bytes.Equal(raw, got))
}

// TestSparseTar: holes that tar leaves out are zeros, and are bounded by what they say.
func TestSparseTar(t *testing.T) {
	testtool.Need(t, "tar")
	raw := rawDisk(8 << 20)
	copy(raw[5<<20:], "data")
	dir := t.TempDir()
	f := testtool.Must(os.Create(filepath.Join(dir, "disk.raw")))(t)
	require.NoError(t, f.Truncate(int64(len(raw))))
	for _, off := range []int{0, 5 << 20} {
		require.NoError(t, testtool.Err(f.WriteAt(raw[off:off+300<<10], int64(off))))
	}
	require.NoError(t, f.Close())
	for _, format := range []string{"gnu", "oldgnu", "posix"} {
		out, err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-S", "--format="+format,
			"-cf", "-", "disk.raw").Output()
		require.NoError(t, err)
		require.Less(t, len(out), 2<<20)
		c, got := testtool.Must2(all("x.tar", out, Options{}))(t, format)
		require.True(t, bytes.Equal(raw, got), format)
		require.Equal(t, int64(len(raw)), c.Size)
	}
}

// TestFileIsOpenedOnce: a file that gets another's name meanwhile is not read instead, nobody
// replaces the one that is read, and a change of that is noticed.
func TestFileIsOpenedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.raw.gz")
	raw := rawDisk(1 << 20)
	require.NoError(t, os.WriteFile(path, packtest.Gzip(t, raw), 0o600))
	_, why := image.Open(path, image.Options{})
	f := testtool.Must(Find(path, why, Options{}))(t)
	defer f.Close()
	require.ErrorAs(t, testtool.Err(durable.CreateNamed(path, 0o600, nil)),
		new(*durable.LockedError))
	require.True(t, f.Is(path))
	other := path + ".other"
	require.NoError(t, os.WriteFile(other, packtest.Gzip(t, make([]byte, 1<<20)), 0o600))
	require.NoError(t, os.Rename(path, path+".before"))
	require.NoError(t, os.Rename(other, path))
	require.False(t, f.Is(path))
	disk := testtool.Must(f.Scratch(t.Context(), image.Options{}, func(int) {}))(t)
	got := testtool.Must(io.ReadAll(io.NewSectionReader(disk, 0, 2<<20)))(t)
	require.NoError(t, disk.Close())
	require.True(t, bytes.Equal(raw, got))
	require.NoError(t, os.Chtimes(path+".before", time.Time{}, time.Unix(1, 0)))
	require.ErrorContains(t, testtool.Err(f.Scratch(t.Context(), image.Options{}, func(int) {})),
		"was changed while it was read")
}

// TestErrorsOfTheReader: a connection that breaks is no fault of the data.
func TestErrorsOfTheReader(t *testing.T) {
	raw := rawDisk(1 << 20)
	broken := errors.New("the connection broke")
	for name, data := range map[string][]byte{"gz": packtest.Gzip(t, raw), "xz": packtest.Xz(raw),
		"zst": packtest.Zstd(t, raw, 1<<20), "tar": packtest.Tar(t, packtest.File{Name: "a.raw",
			Data: raw}), "tgz": packtest.Gzip(t, packtest.Tar(t, packtest.File{Name: "a.raw",
			Data: raw}))} {
		for _, n := range []int{1, 100, 9000, len(data) - 5} {
			for _, err := range []error{broken, io.ErrUnexpectedEOF} {
				r := io.MultiReader(bytes.NewReader(data[:min(n, len(data))]),
					iotest.ErrReader(err))
				c, got := Open(name, r, -1, Options{})
				if got == nil {
					_, got = io.Copy(io.Discard, c)
				}
				own := new(Error)
				require.ErrorIs(t, got, err, "%s after %d", name, n)
				require.False(t, errors.As(got, &own), "%s after %d: %v", name, n, got)
			}
		}
	}
}

// FuzzOpen: anything is unwrapped or refused, without a panic, and with bounded memory.
func FuzzOpen(f *testing.F) {
	raw := rawDisk(4096)
	tarred := packtest.Tar(f, packtest.File{Name: "README", Data: []byte("x\n")},
		packtest.File{Name: "a.raw", Data: raw})
	for _, p := range [][]byte{packtest.Gzip(f, raw), packtest.Xz(raw), tarred,
		packtest.Zstd(f, raw, 1<<20), packtest.Gzip(f, tarred), packtest.Xz(tarred),
		packtest.Tar(f, packtest.File{Name: "a.gz", Data: packtest.Gzip(f, raw)}),
		[]byte("BZh91AY&SY")} {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Open("x", bytes.NewReader(data), int64(len(data)), Options{})
		if err != nil {
			return
		}
		n, err := io.Copy(io.Discard, io.LimitReader(c, 4<<20))
		if err == nil && c.Size >= 0 && n != min(c.Size, 4<<20) {
			t.Fatalf("%d bytes, and not %d", n, c.Size)
		}
		_ = c.Close()
	})
}
