package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
)

const (
	// bufferSize is how much of a file is read at once, in bytes.
	bufferSize = 1 << 20
	// holeSize is the unit of holes, in bytes: this many zeros at a multiple of it are not stored.
	// Smaller holes are not worth an extent.
	holeSize   = 64 << 10
	holeBlocks = holeSize / BlockSize
)

// add makes a file without content and without a name.
func (w *Writer) add(dir Inode, name string, a Attr, kind uint16) (uint32, *inode, error) {
	if _, err := w.checkName(dir, name); err != nil {
		return 0, nil, err
	}
	set, err := w.intern(&a, kind, nil)
	if err != nil {
		return 0, nil, err
	}
	number, err := w.addInode()
	if err != nil {
		return 0, nil, err
	}
	n := w.inodes.at(number)
	n.set(a, kind)
	n.xattrs = set
	return number, n, nil
}

// name gives a file its first name.
func (w *Writer) name(dir Inode, name string, number uint32) Inode {
	w.inodes.at(number).links = 1
	w.enter(w.dirOf(uint32(dir)), name, number)
	return Inode(number)
}

// Create makes a regular file with this content.
func (w *Writer) Create(dir Inode, name string, a Attr, content io.Reader) (Inode, error) {
	number, n, err := w.add(dir, name, a, TypeFile)
	if err != nil {
		return 0, err
	}
	floor := len(w.extents)
	size, err := w.store(content, floor)
	if err != nil {
		return 0, err
	}
	n.size = uint64(size)
	n.at, n.extents = uint32(floor), uint32(len(w.extents)-floor)
	if err := w.writeNodes(number, w.extents[floor:]); err != nil {
		return 0, err
	}
	return w.name(dir, name, number), nil
}

// maxFile is the size of the largest file, in bytes: a block number has 32 bits.
const maxFile = (1<<32 - 1) * BlockSize

// store writes content and appends its extents to w.extents.
func (w *Writer) store(content io.Reader, floor int) (size int64, err error) {
	for {
		n, last, err := fill(w.buffer, content)
		if err != nil {
			return 0, err
		}
		whole := (n + BlockSize - 1) / BlockSize * BlockSize
		clear(w.buffer[n:whole])
		if size+int64(n) > maxFile {
			return 0, errFull
		}
		if err := w.storePart(w.buffer[:whole], uint32(size/BlockSize), floor); err != nil {
			return 0, err
		}
		if size += int64(n); last {
			return size, nil
		}
	}
}

// fill reads until p is full or content ends.
func fill(p []byte, content io.Reader) (n int, last bool, err error) {
	for n < len(p) {
		m, err := content.Read(p[n:])
		n += m
		if err == io.EOF {
			return n, true, nil
		}
		if err != nil {
			return n, false, err
		}
	}
	return n, false, nil
}

// storePart writes whole blocks of a file, starting at a multiple of holeSize. It leaves out holes.
func (w *Writer) storePart(p []byte, logical uint32, floor int) error {
	for len(p) > 0 {
		data := 0 // bytes before the next hole
		for data < len(p) && !isZero(p[data:min(data+holeSize, len(p))]) {
			data = min(data+holeSize, len(p))
		}
		if data == 0 {
			n := min(holeSize, len(p))
			p, logical = p[n:], logical+uint32(n/BlockSize)
			continue
		}
		for data > 0 {
			start, got, err := w.alloc.take(uint32(data / BlockSize))
			if err != nil {
				return err
			}
			n := int(got) * BlockSize
			w.extents = addExtent(w.extents, floor, extent{logical, start, got})
			if err := w.writeData(start, p[:n]); err != nil {
				return err
			}
			p, data, logical = p[n:], data-n, logical+got
		}
	}
	return nil
}

func isZero(p []byte) bool { return bytes.Equal(p, zeros[:len(p)]) }

// writeData writes blocks that were never used before, so it can leave out blocks of zeros.
func (w *Writer) writeData(start uint32, p []byte) error {
	if w.dst == nil {
		return nil
	}
	from := 0
	for i := 0; i < len(p); i += BlockSize {
		if isZero(p[i : i+BlockSize]) {
			if err := w.write(start+uint32(from/BlockSize), p[from:i]); err != nil {
				return err
			}
			from = i + BlockSize
		}
	}
	return w.write(start+uint32(from/BlockSize), p[from:])
}

// Mkdir makes a directory.
func (w *Writer) Mkdir(dir Inode, name string, a Attr) (Inode, error) {
	number, _, err := w.add(dir, name, a, TypeDir)
	if err != nil {
		return 0, err
	}
	w.makeDir(number, uint32(dir), a)
	return w.name(dir, name, number), nil
}

// makeDir makes an inode a directory without entries.
func (w *Writer) makeDir(number, parent uint32, a Attr) {
	n := w.inodes.at(number)
	n.set(a, TypeDir)
	n.links = 1
	n.at = w.dirs.add()
	*w.dirs.at(n.at) = directory{inode: number, parent: parent}
	w.changed(w.dirs.at(n.at))
}

// maxTarget is the longest target of a symbolic link, in bytes.
const maxTarget = BlockSize - 1

// Symlink makes a symbolic link.
func (w *Writer) Symlink(dir Inode, name, target string, a Attr) (Inode, error) {
	if target == "" || len(target) > maxTarget || bytes.IndexByte([]byte(target), 0) >= 0 {
		return 0, fmt.Errorf("a symbolic link cannot lead to a path of %d bytes, or to one with "+
			"a zero byte", len(target))
	}
	number, n, err := w.add(dir, name, a, TypeLink)
	if err != nil {
		return 0, err
	}
	n.size = uint64(len(target))
	if n.shortLink() {
		n.at = w.text.add(target)
		return w.name(dir, name, number), nil
	}
	start, _, err := w.alloc.take(1)
	if err != nil {
		return 0, err
	}
	n.at, n.extents = uint32(len(w.extents)), 1
	w.extents = append(w.extents, extent{0, start, 1})
	w.longLinks[number] = target
	w.linkBytes += len(target)
	p := w.scratch()
	copy(p, target)
	if err := w.write(start, p); err != nil {
		return 0, err
	}
	return w.name(dir, name, number), nil
}

// The largest device numbers have 12 and 20 bits.
const (
	maxMajor = 1<<12 - 1
	maxMinor = 1<<20 - 1
)

// Mknod makes a device, a FIFO or a socket. Only devices have numbers.
func (w *Writer) Mknod(dir Inode, name string, kind uint16, major, minor uint32, a Attr) (
	Inode, error,
) {
	switch {
	case kind == TypeFIFO || kind == TypeSocket:
		major, minor = 0, 0
	case kind != TypeChar && kind != TypeBlock:
		return 0, fmt.Errorf("type %#x is not a device", kind)
	case major > maxMajor || minor > maxMinor:
		return 0, fmt.Errorf("the device number %d:%d is too large", major, minor)
	}
	number, n, err := w.add(dir, name, a, kind)
	if err != nil {
		return 0, err
	}
	n.size = uint64(major)<<32 | uint64(minor)
	return w.name(dir, name, number), nil
}

// Link gives a file a further name.
func (w *Writer) Link(dir Inode, name string, file Inode) error {
	d, err := w.checkName(dir, name)
	if err != nil {
		return err
	}
	n := w.inodes.at(uint32(file))
	switch {
	case n.mode == 0 || n.kind() == TypeDir:
		return errors.New("a directory has only one name")
	case n.links >= maxFileLinks:
		return fmt.Errorf("it has %d names already, and a file has no more", n.links)
	}
	n.links++
	w.touch(uint32(file))
	w.enter(d, name, uint32(file))
	return nil
}

// SetAttr replaces all attributes of a file.
func (w *Writer) SetAttr(file Inode, a Attr) error { return w.setAttr(file, a, nil) }

// AddAttr is SetAttr, but keeps extended attributes that a does not name. If it keeps an ACL, it
// also keeps the mode.
func (w *Writer) AddAttr(file Inode, a Attr) error {
	n := w.inodes.at(uint32(file))
	if n.xattrs == 0 {
		return w.setAttr(file, a, nil)
	}
	stay := w.sets.at(n.xattrs).attrs
	_, named := a.Xattrs[aclAccess]
	isACL := func(x xattr) bool { return x.index == aclAccessIndex }
	if !named && slices.ContainsFunc(stay, isACL) {
		a.Mode = n.mode &^ TypeMask
	}
	return w.setAttr(file, a, stay)
}

// Attr are the attributes of a file, without extended ones.
func (w *Writer) Attr(file Inode) Attr {
	n := w.inodes.at(uint32(file))
	return Attr{Mode: n.mode &^ TypeMask, UID: n.uid, GID: n.gid, Seconds: n.seconds,
		Nanoseconds: n.nanos}
}

func (w *Writer) setAttr(file Inode, a Attr, stay []xattr) error {
	n := w.inodes.at(uint32(file))
	set, err := w.intern(&a, n.kind(), stay)
	if err != nil {
		return err
	}
	if n.xattrs != 0 {
		w.release(n.xattrs)
	}
	n.set(a, n.kind())
	n.xattrs = set
	w.touch(uint32(file))
	return nil
}
