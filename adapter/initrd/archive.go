package initrd

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// Archive is an initramfs in the kernel's "newc" form of cpio
// (Documentation/driver-api/early-userspace/buffer-format.rst). An entry is a header of 110 bytes
// of text, the name with its NUL, and the content; name and content are padded to 4 bytes. cpio(1)
// is not used: it needs root for device nodes and owners, and stores the times and inode numbers of
// a machine. The archive is not compressed, because an emulated machine loads it faster than it
// expands it.
//
// Names are paths in the root, with or without a slash at the beginning. The zero value is an empty
// archive. The same calls give the same bytes.
type Archive struct {
	buf   bytes.Buffer
	inode int
	dirs  map[string]bool
}

// The types of an entry, in the upper bits of its mode (stat(2)).
const (
	typeDir     = 0o040000
	typeFile    = 0o100000
	typeSymlink = 0o120000
	typeChar    = 0o020000
)

// Dir adds a directory and its parents if they are missing.
func (a *Archive) Dir(name string) {
	name = relative(name)
	if name == "" || a.dirs[name] {
		return
	}
	a.Dir(path.Dir(name))
	if a.dirs == nil {
		a.dirs = map[string]bool{}
	}
	a.dirs[name] = true
	a.entry(name, typeDir|0o755, 0, 0, nil)
}

// File adds a regular file, and the directories above it. If two have the same name, the kernel
// keeps the later one.
func (a *Archive) File(name string, mode fs.FileMode, content []byte) {
	a.Dir(path.Dir(relative(name)))
	a.entry(relative(name), typeFile|uint32(mode.Perm()), 0, 0, content)
}

// Symlink adds a symbolic link, and the directories above it.
func (a *Archive) Symlink(name, to string) {
	a.Dir(path.Dir(relative(name)))
	a.entry(relative(name), typeSymlink|0o777, 0, 0, []byte(to))
}

// CharDevice adds a character device of root, and the directories above it.
func (a *Archive) CharDevice(name string, major, minor int) {
	a.Dir(path.Dir(relative(name)))
	a.entry(relative(name), typeChar|0o600, major, minor, nil)
}

// Bytes ends the archive and returns it. Nothing can be added after that.
func (a *Archive) Bytes() []byte {
	a.entry("TRAILER!!!", 0, 0, 0, nil)
	return a.buf.Bytes()
}

// relative is the name of an entry: a clean path without a slash at its beginning, "" for the root.
func relative(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

func (a *Archive) entry(name string, mode uint32, major, minor int, content []byte) {
	a.inode++
	fmt.Fprintf(&a.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", a.inode, mode,
		0, 0, 1, 0, len(content), 0, 0, major, minor, len(name)+1, 0)
	a.buf.WriteString(name)
	a.buf.WriteByte(0)
	a.pad()
	a.buf.Write(content)
	a.pad()
}

func (a *Archive) pad() {
	for a.buf.Len()%4 != 0 {
		a.buf.WriteByte(0)
	}
}
