package guest

import (
	"io/fs"
	"path"
	"strings"

	"kubevirt.io/disk/adapter/initrd"
)

// archive is an initramfs whose root is merged like Debian's: /bin, /sbin, /lib and /lib64 are
// links into /usr, whichever path a package uses.
type archive struct{ initrd.Archive }

var mergedDirs = []string{"bin", "sbin", "lib", "lib64"}

func newArchive() *archive {
	a := new(archive)
	for _, dir := range mergedDirs {
		a.dir("usr/" + dir)
		a.Symlink(dir, "usr/"+dir)
	}
	return a
}

// clean returns a name relative to the merged root.
func clean(name string) string {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	for _, dir := range mergedDirs {
		if name == dir || strings.HasPrefix(name, dir+"/") {
			return "usr/" + name
		}
	}
	return name
}

func (a *archive) dir(name string) { a.Dir(clean(name)) }

func (a *archive) file(name string, mode fs.FileMode, content []byte) {
	a.File(clean(name), mode, content)
}

func (a *archive) symlink(name, to string) { a.Symlink(clean(name), to) }

func (a *archive) device(name string, major, minor int) { a.CharDevice(clean(name), major, minor) }
