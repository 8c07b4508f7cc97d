package adapter

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"

	"kubevirt.io/disk/adapter/ext4"
	"kubevirt.io/disk/internal/bitset"
)

// applier applies layers to a file system, one after the other.
type applier struct {
	fs *ext4.Writer

	maxBytes  int64
	bytesLeft int64
	maxFiles  int
	filesLeft int
	stepsLeft int64

	// explicit are the directories for which this layer has an entry. implicit are those that were
	// made only because a path of this layer leads through them. The parent of an implicit
	// directory is not explicit either.
	explicit, implicit bitset.Set
	// used are the names of lower layers that entries of this layer depend on: symbolic links in
	// their paths, and targets of hard links. A whiteout must not remove them, because then the
	// order of the entries would matter.
	used map[dirEntry]use
	// aboveLinks are the directories of lower layers that contain a followed link, at any depth.
	aboveLinks bitset.Set
}

// use says how this layer has used an entry of a lower layer.
type use uint8

const (
	unused   use = iota
	linkedTo     // an entry is a hard link to it
	followed     // it is a symbolic link through which an entry leads
)

// dirEntry is a name in a directory.
type dirEntry struct {
	dir  ext4.Inode
	name string
}

// maxSteps bounds how many directories and links all paths together may pass. So many take some
// seconds.
const maxSteps = 200 << 20

func newApplier(maxBytes int64, maxFiles int) *applier {
	return &applier{fs: ext4.New(), maxBytes: maxBytes, bytesLeft: maxBytes,
		maxFiles: maxFiles, filesLeft: maxFiles, stepsLeft: maxSteps}
}

func (a *applier) tooManyFiles() error {
	return fmt.Errorf("the image has too many files: its layers may have %d together, with those "+
		"that a higher layer removes", a.maxFiles)
}

// rawLimit bounds the size of the next archive, with its headers and padding: some bytes for each
// file.
func (a *applier) rawLimit() int64 { return a.bytesLeft + int64(a.filesLeft)*4<<10 + 1<<30 }

// apply applies the archive of a layer, as far as tar reads it.
func (a *applier) apply(r io.Reader) error {
	a.explicit, a.implicit, a.aboveLinks = nil, nil, nil
	a.used = make(map[dirEntry]use)
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("its tar archive cannot be read: %w", err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if a.filesLeft--; a.filesLeft < 0 {
			return a.tooManyFiles()
		}
		if err := a.entry(h, tr); err != nil {
			return fmt.Errorf("%s: %w", quoted(h.Name), err)
		}
	}
}

// quoted quotes a name for a message, and cuts it: hostile names may be long.
func quoted(name string) string {
	const most = 300
	if len(name) > most {
		return fmt.Sprintf("%q...", name[:most])
	}
	return fmt.Sprintf("%q", name)
}

// The names with which a layer removes files of the layers below it (image-spec, layer.md,
// "Whiteouts").
const (
	whiteout       = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

func (a *applier) entry(h *tar.Header, content io.Reader) error {
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	if name == "." {
		return a.root(h)
	}
	if strings.HasPrefix(name, whiteoutMeta) && name != whiteoutOpaque {
		return nil // internal to AUFS
	}
	dirName, base := path.Split(name)
	if strings.HasPrefix(dirName, whiteout) || strings.Contains(dirName, "/"+whiteout) {
		return errors.New("lies in a directory that is a whiteout")
	}
	if strings.HasPrefix(base, whiteout) {
		return a.whiteout(dirName, base)
	}
	dir, _, err := a.dir(dirName, true)
	if err != nil {
		return err
	}
	attr, err := attrOf(h)
	if err != nil {
		return err
	}
	return a.put(h, dirEntry{dir, base}, attr, content)
}

// cleanName is a name relative to the root, without "..".
func cleanName(name string) (string, error) {
	if len(name) > maxPath {
		return "", fmt.Errorf("is a name of %d bytes, more than %d", len(name), maxPath)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", errors.New("has a zero byte in its name")
	}
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if clean == ".." || strings.HasPrefix(clean, "../") {
		return "", errors.New("leads out of the image")
	}
	return clean, nil
}

const maxPath = 4096

// root sets the attributes of the root directory.
func (a *applier) root(h *tar.Header) error {
	if h.Typeflag != tar.TypeDir {
		return errors.New("stands for the root, and is not a directory")
	}
	attr, err := attrOf(h)
	if err != nil {
		return err
	}
	return a.fs.SetAttr(ext4.Root, attr)
}

const xattrRecord = "SCHILY.xattr."

// attrOf are the attributes of an entry.
func attrOf(h *tar.Header) (ext4.Attr, error) {
	for _, id := range [...]int{h.Uid, h.Gid} {
		if id < 0 || int64(id) >= math.MaxUint32 {
			return ext4.Attr{}, fmt.Errorf("has the owner %d:%d, which is not valid", h.Uid, h.Gid)
		}
	}
	attr := ext4.Attr{Mode: uint16(h.Mode & 0o7777), UID: uint32(h.Uid), GID: uint32(h.Gid),
		Seconds: h.ModTime.Unix(), Nanoseconds: uint32(h.ModTime.Nanosecond())}
	for key, value := range h.PAXRecords {
		// A record without a value says that there is none (pax, "Extended Header").
		if name, ok := strings.CutPrefix(key, xattrRecord); ok && value != "" {
			if attr.Xattrs == nil {
				attr.Xattrs = make(map[string]string)
			}
			attr.Xattrs[name] = value
		}
	}
	return attr, nil
}

// put makes an entry. It replaces an existing one.
func (a *applier) put(h *tar.Header, at dirEntry, attr ext4.Attr, content io.Reader) error {
	var link ext4.Inode
	if h.Typeflag == tar.TypeLink {
		var err error
		if link, err = a.linkTarget(h.Linkname, at); err != nil {
			return err
		}
	}
	old, there := a.fs.Lookup(at.dir, at.name)
	if there && h.Typeflag == tar.TypeDir && a.fs.Type(old.Inode) == ext4.TypeDir {
		a.explicit.Add(int64(old.Inode))
		return a.fs.SetAttr(old.Inode, attr)
	}
	if there {
		if old.Level == 0 {
			return errors.New("has to be a directory")
		}
		if a.used[at] == followed || a.aboveLinks.Has(int64(old.Inode)) {
			return errors.New("replaces a symbolic link through which other entries of the layer " +
				"lead")
		}
		if err := a.fs.Remove(at.dir, at.name); err != nil {
			return err
		}
	}
	var err error
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		if err = a.take(h.Size); err == nil {
			_, err = a.fs.Create(at.dir, at.name, attr, content)
		}
	case tar.TypeLink:
		if a.fs.Type(link) == 0 {
			return fmt.Errorf("replaces %s, to which it is a link", quoted(h.Linkname))
		}
		err = a.link(at, link, attr)
	case tar.TypeDir:
		var made ext4.Inode
		if made, err = a.mkdir(at, attr); err == nil {
			a.explicit.Add(int64(made))
		}
	case tar.TypeSymlink:
		attr.Mode = 0o777 // like symlink(2); the mode in the archive has no meaning
		if err = a.take(ext4.BlockSize); err == nil {
			_, err = a.fs.Symlink(at.dir, at.name, h.Linkname, attr)
		}
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		err = a.mknod(h, at, attr)
	default:
		err = fmt.Errorf("is of the type %q, which is not supported", h.Typeflag)
	}
	return err
}

func (a *applier) mkdir(at dirEntry, attr ext4.Attr) (ext4.Inode, error) {
	if err := a.take(ext4.BlockSize); err != nil {
		return 0, err
	}
	return a.fs.Mkdir(at.dir, at.name, attr)
}

func (a *applier) mknod(h *tar.Header, at dirEntry, attr ext4.Attr) error {
	if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > math.MaxUint32 ||
		h.Devminor > math.MaxUint32 {
		return fmt.Errorf("has the device number %d:%d, which is not valid", h.Devmajor, h.Devminor)
	}
	kind := uint16(ext4.TypeFIFO)
	switch h.Typeflag {
	case tar.TypeChar:
		kind = ext4.TypeChar
	case tar.TypeBlock:
		kind = ext4.TypeBlock
	}
	_, err := a.fs.Mknod(at.dir, at.name, kind, uint32(h.Devmajor), uint32(h.Devminor), attr)
	return err
}

// take counts the bytes that an entry needs on the disk.
func (a *applier) take(n int64) error {
	if n < 0 || n > a.bytesLeft {
		return fmt.Errorf("is more than the image may expand to: %d bytes, all layers together",
			a.maxBytes)
	}
	a.bytesLeft -= n
	return nil
}

// linkTarget finds the file that a hard link names. It follows links in the path, but not the last
// one, like link(2).
func (a *applier) linkTarget(name string, at dirEntry) (ext4.Inode, error) {
	clean, err := cleanName(name)
	if err != nil {
		return 0, fmt.Errorf("is a link to %s, which %w", quoted(name), err)
	}
	dirName, base := path.Split(clean)
	dir, ok, err := a.dir(dirName, false)
	if err != nil {
		return 0, err
	}
	target, found := ext4.Entry{}, false
	if ok && base != "." {
		target, found = a.fs.Lookup(dir, base)
	}
	switch {
	case !found:
		return 0, fmt.Errorf("is a link to %s, which does not exist", quoted(name))
	case a.fs.Type(target.Inode) == ext4.TypeDir:
		return 0, fmt.Errorf("is a hard link to the directory %s", quoted(name))
	case at == dirEntry{dir, base}:
		return 0, errors.New("is a link to itself")
	}
	if used := (dirEntry{dir, base}); target.Level < a.fs.Level() && a.used[used] == unused {
		a.used[used] = linkedTo
	}
	return target.Inode, nil
}

// link gives a file another name. The attributes of the entry become those of the file, as when a
// runtime unpacks the layer. A symbolic link only gets another owner.
func (a *applier) link(at dirEntry, file ext4.Inode, attr ext4.Attr) error {
	if err := a.fs.Link(at.dir, at.name, file); err != nil {
		return err
	}
	if a.fs.Type(file) == ext4.TypeLink {
		old := a.fs.Attr(file)
		attr.Mode, attr.Seconds, attr.Nanoseconds = old.Mode, old.Seconds, old.Nanoseconds
	}
	return a.fs.AddAttr(file, attr)
}
