package adapter

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// layoutOf writes an OCI layout of layers.
func layoutOf(t testing.TB, layers ...[]byte) string {
	t.Helper()
	dir := shortDir(t)
	blobs := filepath.Join(dir, "blobs", "sha256")
	require.NoError(t, os.MkdirAll(blobs, 0o755))
	type descriptor struct {
		MediaType string `json:"mediaType"`
		Digest    string `json:"digest"`
		Size      int    `json:"size"`
	}
	put := func(mediaType string, content any) descriptor {
		p, ok := content.([]byte)
		if !ok {
			p = must(json.Marshal(content))
		}
		digest := digestOf(p)
		require.NoError(t, os.WriteFile(filepath.Join(blobs, digest[len("sha256:"):]), p, 0o644))
		return descriptor{"application/vnd.oci.image." + mediaType, digest, len(p)}
	}
	var found []descriptor
	var ids []string
	for _, l := range layers {
		found = append(found, put("layer.v1.tar", l))
		ids = append(ids, digestOf(l))
	}
	config := put("config.v1+json", map[string]any{"os": "linux", "architecture": runtime.GOARCH,
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
	manifest := put("manifest.v1+json", map[string]any{"schemaVersion": 2, "config": config,
		"mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": found})
	index := must(json.Marshal(map[string]any{"schemaVersion": 2,
		"manifests": []descriptor{manifest}}))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "oci-layout"),
		[]byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
	return dir
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// shortDir is a directory that podman accepts: with a short path, and without capital letters.
func shortDir(t testing.TB) string {
	t.Helper()
	dir := testtool.Must(os.MkdirTemp("", "levels-"))(t)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// podmanTree is what podman mounts of an image, with a storage of whole copies: with overlayfs, the
// link counts would be those of a layer.
func podmanTree(t *testing.T, store, layout string) map[string]node {
	t.Helper()
	podman := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("podman", append([]string{"--root", filepath.Join(store, "root"),
			"--runroot", filepath.Join(store, "run"), "--storage-driver", "vfs"}, args...)...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out := testtool.Must(cmd.Output())(t, "podman %v: %s", args, stderr.String())
		return strings.TrimSpace(string(out))
	}
	id := podman("pull", "-q", "oci:"+layout)
	root := podman("image", "mount", id)
	defer podman("rmi", "-f", id)
	defer podman("image", "unmount", id)
	return readTree(t, root)
}

// TestAsPodmanMountsIt compares images of different kinds with podman's mounts.
func TestAsPodmanMountsIt(t *testing.T) {
	testtool.Need(t, "podman")
	testtool.Needs(t, "root (to mount)", os.Geteuid() == 0)
	when := time.Unix(1700000000, 123456789)
	set := func(i item, change func(h *tar.Header)) item {
		change(&i.Header)
		return i
	}
	dirs := func(names ...string) (items []item) {
		for _, n := range names {
			items = append(items, set(directory(n), func(h *tar.Header) { h.ModTime = when }))
		}
		return items
	}
	with := func(lists ...[]item) (all []item) {
		for _, l := range lists {
			all = append(all, l...)
		}
		return all
	}
	another := func(name, target string) item { // tools write the file's own mode
		return set(link(tar.TypeLink, name, target), func(h *tar.Header) { h.Mode = 0o644 })
	}
	tools := dirs("bin", "etc")
	tools = append(tools, file("bin/busybox", strings.Repeat("binary", 30000)))
	for i := range 300 {
		tools = append(tools, link(tar.TypeSymlink, fmt.Sprint("bin/tool", i), "busybox"))
	}
	many := dirs("many")
	for i := range 3000 {
		many = append(many, file(fmt.Sprintf("many/%s%d", strings.Repeat("n", i%200), i), "x"))
	}
	xattr := func(name string, pairs ...string) item {
		return set(file(name, "x"), func(h *tar.Header) {
			h.PAXRecords = make(map[string]string)
			for i := 0; i < len(pairs); i += 2 {
				h.PAXRecords["SCHILY.xattr."+pairs[i]] = pairs[i+1]
			}
		})
	}
	usr := with(dirs("usr", "usr/lib", "usr/bin"), []item{link(tar.TypeSymlink, "lib", "usr/lib"),
		link(tar.TypeSymlink, "bin", "usr/bin"), file("usr/lib/libc.so", "c")})
	for name, layers := range map[string][][]item{
		"tools as links":      {tools, {file("etc/motd", "hello")}},
		"a large directory":   {many, {file("many/.wh.n1", ""), file("many/new", "y")}},
		"directories replace": {with(dirs("a"), []item{file("a/x", "1")}), {file("a", "2")}},
		"hard links": {with(dirs("h"), []item{file("h/1", "x"), another("h/2", "h/1"),
			another("3", "h/2")}), {file("h/.wh.1", "")}},
		"opaque": {with(dirs("o", "o/p"), []item{file("o/p/q", ""), file("o/r", "")}),
			with(dirs("o"), []item{file("o/.wh..wh..opq", ""), file("o/s", "t")})},
		"attributes": {{xattr("user", "user.a", "b", "user.empty", ""),
			xattr("capability", "security.capability", capability),
			xattr("large", "user.large", strings.Repeat("v", 1000), "trusted.x", "y")}},
		"owners and modes": {{set(file("suid", "x"), func(h *tar.Header) {
			h.Mode, h.Uid, h.Gid = 0o6755, 70000, 100000
		}), set(directory("sticky"), func(h *tar.Header) { h.Mode, h.Gid = 0o1777, 5 })}},
		"devices": {with(dirs("dev"), []item{
			{tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3,
				Mode: 0o666}, ""},
			{tar.Header{Name: "dev/sda", Typeflag: tar.TypeBlock, Devmajor: 8, Devminor: 300,
				Mode: 0o600}, ""},
			{tar.Header{Name: "dev/fifo", Typeflag: tar.TypeFifo, Mode: 0o622}, ""}})},
		"usr-merged": {usr, {file("lib/new.so", "n"), file("bin/new", "n"),
			file("usr/lib/.wh.libc.so", "")}},
		"long names": {{file(strings.Repeat("n", 255), "x"),
			file(strings.Repeat("d/", 400)+"f", ""),
			link(tar.TypeSymlink, "l", strings.Repeat("t", 3000))}},
		"sparse and large": {{file("zeros", strings.Repeat("\x00", 5<<20)),
			file("mixed", strings.Repeat("\x00", 100000)+"x"+strings.Repeat("\x00", 300000))}},
	} {
		t.Run(name, func(t *testing.T) {
			var archives [][]byte
			for _, items := range layers {
				for i := range items {
					if items[i].ModTime.IsZero() {
						items[i].ModTime = when
					}
				}
				archives = append(archives, layerOf(t, items...))
			}
			want := podmanTree(t, shortDir(t), layoutOf(t, archives...))
			got := treeOf(t, archives...)
			// A directory for which a layer has no entry gets the time of unpacking.
			for p, n := range want {
				if mine := got[p]; n.Mode&0xf000 == 0x4000 && n.Mtime.After(when.Add(time.Hour)) {
					n.Mtime = mine.Mtime
					want[p] = n
				}
			}
			delete(want, "")
			delete(got, "")
			require.Equal(t, want, got)
		})
	}
}
