package adapter

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestHostileLayersAreRefused has layers that make no sense. The message names the layer and the
// path.
func TestHostileLayersAreRefused(t *testing.T) {
	xattr := func(name, value string) item {
		i := file("x", "")
		i.PAXRecords = map[string]string{"SCHILY.xattr." + name: value}
		return i
	}
	owner := file("x", "")
	owner.Uid = -1
	device := item{tar.Header{Name: "x", Typeflag: tar.TypeChar, Devmajor: 1 << 20}, ""}
	fifo := item{tar.Header{Name: ".", Typeflag: tar.TypeFifo}, ""}
	loop := []item{link('2', "a", "b"), link('2', "b", "a"), file("a/x", "")}
	long := strings.Repeat("n", 4096)
	for name, c := range map[string]struct {
		message string
		items   []item
	}{
		"out of the image":  {"leads out of the image", []item{file("../x", "")}},
		"out by a detour":   {"leads out of the image", []item{file("a/../../x", "")}},
		"a link that loops": {"more than 40 symbolic links", loop},
		"a link to itself":  {"does not exist", []item{link('1', "a", "a")}},
		"a link over its target": {"to which it is a link",
			[]item{file("d/f", ""), link('1', "d", "d/f")}},
		"a hard link to a directory": {"hard link to the directory",
			[]item{directory("d"), link('1', "x", "d")}},
		"a link out": {"leads out of the image",
			[]item{link('1', "x", "../../etc/passwd")}},
		"a link to nothing":  {"does not exist", []item{link('1', "x", "nothing")}},
		"the root as a link": {"stands for the root", []item{link('2', ".", "/etc")}},
		"the root as a FIFO": {"stands for the root", []item{fifo}},
		"below a file":       {"not a directory", []item{file("a", ""), file("a/b", "")}},
		"a long name":        {"more than 255", []item{file(long[:256], "")}},
		"a long path":        {"more than 4096", []item{file("a/"+long, "")}},
		"a long link":        {"4096 bytes", []item{link('2', "x", long)}},
		"a long xattr name":  {"more than 255", []item{xattr("user."+long[:251], "v")}},
		"an unknown xattr": {"cannot be stored: only user",
			[]item{xattr("nonsense.x", "v")}},
		"a large xattr": {"extended attributes take", []item{xattr("user.x", long)}},
		"a wrong ACL": {"not a valid ACL",
			[]item{xattr("system.posix_acl_access", "v")}},
		"an owner that cannot be": {"owner -1", []item{owner}},
		"a device that cannot be": {"too large", []item{device}},
		"an empty whiteout":       {"whiteout without a name", []item{file("d/.wh.", "")}},
		"a whiteout of all":       {"whiteout without a name", []item{file("d/.wh...", "")}},
		"below a whiteout":        {"that is a whiteout", []item{file("d/.wh.x/y", "")}},
		"lost+found as a file":    {"has to be a directory", []item{file("lost+found", "")}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			img := imageOf(layerOf(t, c.items...))
			_, err := Build(context.Background(), img, dir, Options{})
			require.ErrorContains(t, err, c.message)
			require.ErrorContains(t, err, "layer 1, "+img.Layers[0].Digest+": ")
			require.Less(t, len(err.Error()), 1000)
			filetest.Empty(t, dir)
		})
	}
}

// TestStrangeLayersAreContained has layers that are strange, but have a meaning.
func TestStrangeLayersAreContained(t *testing.T) {
	for name, c := range map[string]struct {
		layers [][]item
		want   string // paths
	}{
		"an absolute name": {[][]item{{file("/a", "")}}, "a"},
		"an absolute link": {[][]item{{link('2', "a", "/b"), file("a/c", "")}}, "a b b/c"},
		"a link out of the root": {[][]item{{link('2', "a", "../../b"), file("a/c", "")}},
			"a b b/c"},
		"duplicates": {[][]item{{file("a", "1"), directory("a"), file("a/b", ""),
			file("a", "2")}}, "a"},
		"a directory over a link": {[][]item{{directory("d"), file("d/x", ""),
			link('2', "l", "d")}, {directory("l"), file("l/y", "")}}, "d d/x l l/y"},
		"a file over a directory": {[][]item{{file("d/e/f", "")}, {file("d", "")}}, "d"},
		"AUFS": {[][]item{{file(".wh..wh.aufs", ""), file(".wh..wh.plnk/1", ""),
			file("a", "")}}, "a"},
		"a whiteout of nothing": {[][]item{{file("a/.wh.b", ""), file("c", "")}}, "c"},
		"a whiteout and its file": {[][]item{{file("a", "1")}, {file("a", "2"),
			file(".wh.a", "")}}, "a"},
		"a whiteout behind": {[][]item{{file("d/old", "")}, {file("d/new", ""),
			file(".wh.d", "")}}, "d d/new"},
		"opaque behind": {[][]item{{file("d/old", ""), file("d/e/old", "")},
			{file("d/e/new", ""), file("d/.wh..wh..opq", "")}}, "d d/e d/e/new"},
		"opaque root": {[][]item{{file("d/old", ""), file("f", "")},
			{file(".wh..wh..opq", ""), file("new", "")}}, "new"},
		"lost+found": {[][]item{{file("lost+found/x", ""), file("a", "")},
			{file(".wh.lost+found", "")}}, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			var layers [][]byte
			for _, items := range c.layers {
				layers = append(layers, layerOf(t, items...))
			}
			require.Equal(t, c.want, strings.Join(pathsOf(treeOf(t, layers...)), " "))
		})
	}
}

// sparseFile is the archive of a GNU sparse file that is one hole, in 1.5 KiB (GNU tar's manual,
// "Storing Sparse Files"). The tar package reads such archives and does not write them.
func sparseFile(size int64) []byte {
	archive := make([]byte, 3*512)
	h := archive[:512]
	copy(h, "sparse")
	copy(h[100:], "0000644\x000000000\x000000000\x0000000000000\x0000000000000\x00        S")
	copy(h[257:], "ustar  \x00")
	number := func(at int, n int64) { copy(h[at:at+12], fmt.Sprintf("%011o\x00", n)) }
	size256 := func(at int, n int64) { // in base 256
		h[at] = 0x80
		binary.BigEndian.PutUint64(h[at+4:], uint64(n))
	}
	size256(386, size) // the only run of data: none, at the end
	number(398, 0)
	size256(483, size)
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return archive
}

// TestKilobytesThatMeanMuch: a small archive of a large sparse file counts with its expanded size.
func TestKilobytesThatMeanMuch(t *testing.T) {
	_, err := Build(context.Background(), imageOf(sparseFile(128<<30)), t.TempDir(), Options{})
	require.ErrorContains(t, err, `"sparse": is more than the image may expand to`)
	dir := t.TempDir()
	d := build(t, dir, imageOf(sparseFile(1<<30)))
	require.Less(t, d.Levels[0].Bytes, int64(256<<10))
	fsck(t, flatten(t, dir, d.Levels))
}

// TestManyFiles: a hundred thousand empty files take a tenth of the memory that a million may take.
func TestManyFiles(t *testing.T) {
	const files = 100000
	in, out := io.Pipe()
	go func() {
		w := tar.NewWriter(out)
		var err error
		for i := 0; i < files && err == nil; i++ {
			err = w.WriteHeader(&tar.Header{Name: fmt.Sprintf("%d/file-%d", i/1000, i),
				Typeflag: tar.TypeReg, Mode: 0o644})
		}
		out.CloseWithError(errors.Join(err, w.Close()))
	}()
	img := imageOf(nil)
	img.Layers[0].Open = func(context.Context) (io.ReadCloser, error) { return in, nil }
	runtime.GC()
	runtime.GC() // the second collection empties the pools
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	most := uint64(0)
	_, err := Build(context.Background(), img, t.TempDir(), Options{Progress: func(int, int64) {
		runtime.ReadMemStats(&now)
		most = max(most, now.HeapInuse)
	}})
	require.NoError(t, err)
	require.Less(t, most, before.HeapInuse+26<<20)
}

// TestWhiteoutOfWhatIsUsed: whether a link is followed must not depend on where its whiteout is.
func TestWhiteoutOfWhatIsUsed(t *testing.T) {
	lower := layerOf(t, directory("d"), link('2', "l", "d"), file("f", ""),
		link('2', "p/l", "nowhere"))
	for _, items := range [][]item{
		{file("l/x", ""), file(".wh.l", "")},
		{link('1', "g", "f"), file(".wh.f", "")},
		{file("l/x", ""), file("l", ""), file(".wh.l", "")}, // it would lie where "l" led to
		{link('1', "g", "f"), file("f", "new"), file(".wh.f", "")},
		{file("p/l/x", ""), file("p", "")},
	} {
		_, err := Build(context.Background(), imageOf(lower, layerOf(t, items...)), t.TempDir(),
			Options{})
		require.ErrorContains(t, err, "through which other entries of the layer lead")
	}
}

// TestDeepTree has a directory in a directory, and so on, deeper than a path can say.
func TestDeepTree(t *testing.T) {
	deep := strings.Repeat("d/", 1000)
	items := []item{directory(deep)}
	for i := range 20 {
		items = append(items, link('2', fmt.Sprint("l", i), deep))
	}
	for i := range 19 {
		items = append(items, link('2', fmt.Sprint("l", i, "/", "next"), "/l0"))
	}
	dir := t.TempDir()
	d := build(t, dir, imageOf(layerOf(t, items...), layerOf(t, file(".wh.d", ""))))
	for i := range d.Levels {
		fsck(t, flatten(t, dir, d.Levels[:i+1]))
	}
}

// FuzzLayers makes layers from its input: three bytes for each entry. If they are accepted, e2fsck
// must find nothing wrong with the file system.
func FuzzLayers(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 255, 0, 0, 6, 7, 8})
	f.Add([]byte("aabbccddeeffgg\xffhhiijj\xff\x00kkll"))
	names := []string{"a", "b", "a/b", "a/b/c", "b/a", ".", "..", "/a", "a/../b", "a/./c", "",
		".wh.a", "a/.wh.b", ".wh..wh..opq", "a/.wh..wh..opq", ".wh..wh.x", "b/.wh.a", "lost+found",
		"lost+found/x", strings.Repeat("n", 255), strings.Repeat("n", 256), "a\x00b", "c/a", "c"}
	kinds := []byte{tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeChar,
		tar.TypeBlock, tar.TypeFifo, tar.TypeReg}
	targets := []string{"a", "b", "/", "..", "a/b", "/a/b", "../../b", "c", ".", "loop",
		strings.Repeat("t", 60), strings.Repeat("t", 4095)}
	xattrs := []string{"user.a", "trusted.b", "security.capability", "user." +
		strings.Repeat("n", 250), "system.posix_acl_access", "x"}
	f.Fuzz(func(t *testing.T, p []byte) {
		var layers [][]byte
		var items []item
		for ; len(p) >= 3 && len(layers) < 4; p = p[3:] {
			if p[0] == 255 {
				layers, items = append(layers, layerOf(t, items...)), nil
				continue
			}
			i := item{Header: tar.Header{Name: names[int(p[0])%len(names)],
				Typeflag: kinds[int(p[1])%len(kinds)], Mode: int64(p[2]) << 4}}
			switch i.Typeflag {
			case tar.TypeReg:
				if i.content = strings.Repeat("c", int(p[2])*300); strings.HasSuffix(i.Name, "/") {
					continue
				}
			case tar.TypeSymlink, tar.TypeLink:
				i.Linkname = targets[int(p[2])%len(targets)]
			}
			if p[1] > 200 {
				i.PAXRecords = map[string]string{"SCHILY.xattr." +
					xattrs[int(p[2])%len(xattrs)]: strings.Repeat("v", int(p[2])*20)}
			}
			if strings.ContainsRune(i.Name, 0) || i.Name == "" {
				continue // tar cannot express it
			}
			items = append(items, i)
		}
		layers = append(layers, layerOf(t, items...))
		dir := t.TempDir()
		d, err := Build(context.Background(), imageOf(layers...), dir,
			Options{MaxBytes: 8 << 20, MaxFiles: 200})
		if err != nil {
			return
		}
		fsck(t, flatten(t, dir, d.Levels))
	})
}

// FuzzArchive has layers that are not archives, or nearly archives.
func FuzzArchive(f *testing.F) {
	f.Add(layerOf(f, file("a", "b"), directory("c"), link(tar.TypeSymlink, "d", "e")))
	long := file(strings.Repeat("n", 150), "x")
	long.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "b", "GNU.sparse.map": "0,1"}
	f.Add(layerOf(f, long))
	f.Fuzz(func(t *testing.T, p []byte) {
		_, _ = Build(context.Background(), imageOf(p), t.TempDir(),
			Options{MaxBytes: 8 << 20, MaxFiles: 200})
	})
}
