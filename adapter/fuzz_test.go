package adapter

import (
	"archive/tar"
	"context"
	"strings"
	"testing"
)

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
