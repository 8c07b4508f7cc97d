package adapter

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
)

// item is an entry of a layer. Its header is that of tar, with a name and a type.
type item struct {
	tar.Header
	content string
}

func file(name, content string) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content}
}

func directory(name string) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func link(kind byte, name, target string) item {
	return item{tar.Header{Name: name, Typeflag: kind, Linkname: target, Mode: 0o777}, ""}
}

// layerOf makes the archive of a layer.
func layerOf(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, i := range items {
		h := i.Header
		h.Size, h.Format = int64(len(i.content)), tar.FormatPAX
		require.NoError(t, w.WriteHeader(&h))
		require.NoError(t, testtool.Err(w.Write([]byte(i.content))))
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

func digestOf(p []byte) string {
	sum := sha256.Sum256(p)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// imageOf is an image of archives.
func imageOf(layers ...[]byte) Image {
	img := Image{Config: []byte(`{"config":{}}`)}
	for _, l := range layers {
		img.Layers = append(img.Layers, Layer{Digest: digestOf(l), DiffID: digestOf(l),
			Open: func(context.Context) (io.ReadCloser, error) {
				return io.NopCloser(bytes.NewReader(l)), nil
			}})
	}
	return img
}

func build(t testing.TB, dir string, img Image) *Disk {
	t.Helper()
	return testtool.Must(Build(context.Background(), img, dir, Options{}))(t)
}

type contextFile struct{ *os.File }

func (f contextFile) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return f.File.ReadAt(p, off)
}

// flatten writes the disk at a level into a raw file.
func flatten(t testing.TB, dir string, levels []Level) string {
	t.Helper()
	raw := testtool.Must(os.Create(filepath.Join(t.TempDir(), "raw")))(t)
	defer raw.Close()
	p := make([]byte, 1<<20)
	for i, l := range levels { // the data of a level lies over that of the levels below
		f := testtool.Must(os.Open(filepath.Join(dir, l.File)))(t)
		defer f.Close()
		im, err := qcow2.Open(context.Background(), contextFile{f}, l.Bytes, qcow2.Options{})
		require.NoError(t, err)
		if i > 0 {
			require.Equal(t, levels[i-1].File, im.Info().BackingFile)
		}
		require.NoError(t, raw.Truncate(im.Size()))
		for off := int64(0); off < im.Size(); {
			n, kind := testtool.Must2(im.Extent(context.Background(), off, im.Size()-off))(t)
			for end := off + n; off < end; {
				part := p[:min(int64(len(p)), end-off)]
				if kind == qcow2.KindUnallocated {
					off = end
					continue
				}
				require.NoError(t, testtool.Err(im.ReadAt(context.Background(), part, off)))
				require.NoError(t, testtool.Err(raw.WriteAt(part, off)))
				off += int64(len(part))
			}
		}
	}
	return raw.Name()
}

// fsck runs e2fsck, which must find nothing.
func fsck(t testing.TB, raw string) {
	t.Helper()
	testtool.Need(t, "e2fsck")
	out, err := exec.Command("e2fsck", "-fn", raw).CombinedOutput()
	require.NoError(t, err, "e2fsck: %s", out)
	for _, sign := range []string{"Fix?", "IGNORED", "differ", "WARNING", "Clear?"} {
		require.NotContains(t, string(out), sign)
	}
}

// node is a file of a tree, as far as it can be compared.
type node struct {
	Mode    uint32 // with type
	UID     uint32
	GID     uint32
	Mtime   time.Time
	Content string // of a file; the target of a link
	Dev     uint64
	Links   uint64 // not of directories
	Same    string // the first path of the same inode
	Xattrs  map[string]string
}

// mount mounts a raw file read-only by the kernel, and returns where.
func mount(t testing.TB, raw string) string {
	t.Helper()
	testtool.Need(t, "losetup")
	testtool.Needs(t, "root (to mount)", os.Geteuid() == 0)
	dir := t.TempDir()
	out, err := exec.Command("mount", "-t", "ext4", "-o", "loop,ro", raw, dir).CombinedOutput()
	require.NoError(t, err, "mount: %s", out)
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// readTree reads a mounted file system, without lost+found.
func readTree(t testing.TB, root string) map[string]node {
	t.Helper()
	tree := make(map[string]node)
	first := make(map[uint64]string)
	require.NoError(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
		if name == "lost+found" {
			return fs.SkipDir
		}
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(path, &st))
		n := node{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Mtime: time.Unix(st.Mtim.Unix()).UTC(),
			Dev: st.Rdev, Xattrs: xattrsOf(t, path)}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			p := filetest.Content(t, path)
			n.Content = string(p)
		case unix.S_IFLNK:
			n.Content = testtool.Must(os.Readlink(path))(t)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			n.Links = st.Nlink
			if first[st.Ino] == "" {
				first[st.Ino] = name
			}
			n.Same = first[st.Ino]
		}
		tree[name] = n
		return nil
	}))
	return tree
}

func xattrsOf(t testing.TB, path string) map[string]string {
	t.Helper()
	var found map[string]string
	p := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, p)
	if errors.Is(err, syscall.ENOTSUP) {
		return nil
	}
	require.NoError(t, err)
	for name := range strings.SplitSeq(string(p[:n]), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n := testtool.Must(unix.Lgetxattr(path, name, value))(t)
		if found == nil {
			found = make(map[string]string)
		}
		found[name] = string(value[:n])
	}
	return found
}

// treeOf builds an image, checks and mounts the file system at each level, and returns what the
// kernel sees at the top.
func treeOf(t testing.TB, layers ...[]byte) map[string]node {
	t.Helper()
	dir := t.TempDir()
	d := build(t, dir, imageOf(layers...))
	var mounted string
	for i := range d.Levels {
		raw := flatten(t, dir, d.Levels[:i+1])
		fsck(t, raw)
		mounted = mount(t, raw)
	}
	return readTree(t, mounted)
}

func pathsOf(tree map[string]node) []string {
	var paths []string
	for path := range tree {
		if path != "" {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths
}
