package guest

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// archive is an initramfs in the kernel's "newc" form of cpio
// (Documentation/driver-api/early-userspace/buffer-format.rst). An entry is a header of 110 bytes
// of text, the name with its NUL, and the content; name and content are padded to 4 bytes. We write
// it ourselves, because cpio(1) needs root for device nodes and owners. It is not compressed,
// because QEMU's emulation takes longer to expand it than to load it.
//
// The root is merged as Debian's is: /bin, /sbin, /lib and /lib64 are links into /usr, whichever
// path a package uses.
type archive struct {
	buf   bytes.Buffer
	inode int
	dirs  map[string]bool
}

var mergedDirs = []string{"bin", "sbin", "lib", "lib64"}

func newArchive() *archive {
	a := &archive{dirs: map[string]bool{".": true}}
	for _, dir := range mergedDirs {
		a.dir("usr/" + dir)
		a.entry(dir, 0o120777, 0, 0, []byte("usr/"+dir))
	}
	return a
}

// clean returns a name relative to the merged root.
func clean(name string) string {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if name == "" {
		return "."
	}
	for _, dir := range mergedDirs {
		if name == dir || strings.HasPrefix(name, dir+"/") {
			return "usr/" + name
		}
	}
	return name
}

// dir adds a directory and its parents, unless they are there.
func (a *archive) dir(name string) {
	name = clean(name)
	if a.dirs[name] {
		return
	}
	a.dir(path.Dir(name))
	a.dirs[name] = true
	a.entry(name, 0o040755, 0, 0, nil)
}

// file adds a regular file. If two have the same name, the kernel keeps the later one.
func (a *archive) file(name string, mode fs.FileMode, content []byte) {
	name = clean(name)
	a.dir(path.Dir(name))
	a.entry(name, 0o100000|uint32(mode.Perm()), 0, 0, content)
}

func (a *archive) symlink(name, to string) {
	name = clean(name)
	a.dir(path.Dir(name))
	a.entry(name, 0o120777, 0, 0, []byte(to))
}

// device adds a character device.
func (a *archive) device(name string, major, minor int) {
	name = clean(name)
	a.dir(path.Dir(name))
	a.entry(name, 0o020600, major, minor, nil)
}

func (a *archive) entry(name string, mode uint32, major, minor int, content []byte) {
	a.inode++
	fmt.Fprintf(&a.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", a.inode, mode,
		0, 0, 1, 0, len(content), 0, 0,
		major, minor, len(name)+1, 0)
	a.buf.WriteString(name)
	a.buf.WriteByte(0)
	a.pad()
	a.buf.Write(content)
	a.pad()
}

func (a *archive) pad() {
	for a.buf.Len()%4 != 0 {
		a.buf.WriteByte(0)
	}
}

// bytes ends the archive and returns it.
func (a *archive) bytes() []byte {
	a.entry("TRAILER!!!", 0, 0, 0, nil)
	return a.buf.Bytes()
}
