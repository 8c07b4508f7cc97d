package ext4

import "fmt"

// entry is a name in a directory.
type entry struct {
	dir, inode uint32
	next, prev uint32 // in the directory; 0: none
	name       uint32 // in Writer.text
	hash       uint32 // in Writer.names
	level      uint16 // number of the one that made it
	length     uint8  // of the name
}

// directory is the Writer's record of a directory besides its inode. It has no pointers, because
// there may be a million.
type directory struct {
	inode, parent uint32
	first, last   uint32 // entries; 0: none
	subdirs       uint32
	blocks        uint32
	start         uint32 // of its only extent; of more, dirExtents has all
	bytes         uint32 // of its entries, without "." and ".."
	indexed       bool
	changed       bool // its blocks have to be written again
}

// Entry is the result of Lookup.
type Entry struct {
	Inode Inode
	Level int // number of the one that made the name; 0: New made it
}

// Lookup finds a name in a directory.
func (w *Writer) Lookup(dir Inode, name string) (Entry, bool) {
	i := w.find(uint32(dir), name)
	if i == 0 {
		return Entry{}, false
	}
	e := w.entries.at(i)
	return Entry{Inode(e.inode), int(e.level)}, true
}

// Names returns the names in a directory, in the order in which they were made.
func (w *Writer) Names(dir Inode) []string {
	d := w.dirOf(uint32(dir))
	if d == nil {
		return nil
	}
	var names []string
	for i := d.first; i != 0; i = w.entries.at(i).next {
		names = append(names, string(w.nameOf(w.entries.at(i))))
	}
	return names
}

// Empty reports whether a directory has no names.
func (w *Writer) Empty(dir Inode) bool {
	d := w.dirOf(uint32(dir))
	return d == nil || d.first == 0
}

// Type returns the type of a file, such as TypeDir; 0 if it was removed.
func (w *Writer) Type(n Inode) uint16 { return w.inodes.at(uint32(n)).kind() }

// Parent returns the directory that a directory is in. That of the root is the root.
func (w *Writer) Parent(dir Inode) Inode {
	if d := w.dirOf(uint32(dir)); d != nil {
		return Inode(d.parent)
	}
	return Root
}

// Target returns the target of a symbolic link.
func (w *Writer) Target(link Inode) string {
	n := w.inodes.at(uint32(link))
	if n.shortLink() {
		return string(w.text.get(n.at, int(n.size)))
	}
	return w.longLinks[uint32(link)]
}

func (w *Writer) nameOf(e *entry) []byte { return w.text.get(e.name, int(e.length)) }

// dirOf returns the directory of an inode, or nil if it is something else.
func (w *Writer) dirOf(number uint32) *directory {
	if n := w.inodes.at(number); n.kind() == TypeDir {
		return w.dirs.at(n.at)
	}
	return nil
}

func (w *Writer) find(dir uint32, name string) uint32 {
	return w.names.find(w.names.hash(dir, name), func(i uint32) bool {
		e := w.entries.at(i)
		return e.dir == dir && string(w.nameOf(e)) == name
	})
}

func (w *Writer) hashOf(i uint32) uint32 { return w.entries.at(i).hash }

// maxText bounds the memory for names and the targets of links, in bytes.
const maxText = 64 << 20

// maxName is the longest name of a file, in bytes.
const maxName = 255

// checkName refuses names that no directory can have, and names that this one already has.
func (w *Writer) checkName(dir Inode, name string) (*directory, error) {
	d := w.dirOf(uint32(dir))
	switch {
	case d == nil:
		return nil, fmt.Errorf("inode %d is not a directory", dir)
	case name == "" || name == "." || name == "..":
		return nil, fmt.Errorf("a file cannot have the name %q", name)
	case len(name) > maxName:
		return nil, fmt.Errorf("the name %.40q... has %d bytes, more than %d", name, len(name),
			maxName)
	}
	for i := range len(name) {
		if name[i] == 0 || name[i] == '/' {
			return nil, fmt.Errorf("the name %q has a byte that no name can have", name)
		}
	}
	if w.find(uint32(dir), name) != 0 {
		return nil, fmt.Errorf("the name %q exists already", name)
	}
	if len(w.text.chunks)*textChunk+w.linkBytes > maxText {
		return nil, fmt.Errorf("the names in the file system have more than %d bytes", maxText)
	}
	return d, nil
}

func (w *Writer) enter(d *directory, name string, number uint32) {
	w.insert(d, name, number, uint16(w.level))
	if w.dirOf(number) != nil {
		d.subdirs++
		w.touch(d.inode)
	}
	w.changed(d)
}

// insert adds a name to the directory in memory.
func (w *Writer) insert(d *directory, name string, number uint32, level uint16) {
	var i uint32
	if last := len(w.unused) - 1; last >= 0 {
		i, w.unused = w.unused[last], w.unused[:last]
	} else {
		i = w.entries.add()
	}
	*w.entries.at(i) = entry{dir: d.inode, inode: number, prev: d.last, level: level,
		name: w.text.add(name), length: uint8(len(name)), hash: w.names.hash(d.inode, name)}
	if d.last == 0 {
		d.first = i
	} else {
		w.entries.at(d.last).next = i
	}
	d.last = i
	d.bytes += uint32(entryLength(len(name)))
	w.names.insert(i, w.hashOf)
}

// drop removes an entry from its directory. The file is not changed.
func (w *Writer) drop(i uint32) {
	e := w.entries.at(i)
	d := w.dirOf(e.dir)
	w.names.remove(i, w.hashOf)
	if e.prev == 0 {
		d.first = e.next
	} else {
		w.entries.at(e.prev).next = e.next
	}
	if e.next == 0 {
		d.last = e.prev
	} else {
		w.entries.at(e.next).prev = e.prev
	}
	d.bytes -= uint32(entryLength(int(e.length)))
	if w.dirOf(e.inode) != nil {
		d.subdirs--
		w.touch(d.inode)
	}
	w.changed(d)
	*e = entry{}
	w.unused = append(w.unused, i)
}

// changed notes that the blocks of a directory have to be written.
func (w *Writer) changed(d *directory) {
	if !d.changed {
		d.changed = true
		w.changedDirs = append(w.changedDirs, d.inode)
	}
}

// Remove removes a name. If it is a directory, it removes everything in it, too.
func (w *Writer) Remove(dir Inode, name string) error {
	i := w.find(uint32(dir), name)
	if i == 0 {
		return fmt.Errorf("there is no %q to remove", name)
	}
	// Without recursion: a tree may be deep.
	for stack := []uint32{i}; len(stack) > 0; {
		top := stack[len(stack)-1]
		number := w.entries.at(top).inode
		if d := w.dirOf(number); d != nil && d.first != 0 {
			stack = append(stack, d.first)
			continue
		}
		stack = stack[:len(stack)-1]
		w.drop(top)
		w.unlink(number)
	}
	return nil
}

// unlink removes a name of a file. Without names, the file's blocks and its inode become free.
func (w *Writer) unlink(number uint32) {
	w.touch(number)
	n := w.inodes.at(number)
	if n.links--; n.links > 0 {
		return
	}
	if n.hasExtents() {
		for _, e := range w.extentsOf(n) {
			w.alloc.freeRun(e.start, e.length)
		}
	}
	for _, block := range w.nodes[number] {
		w.alloc.free(block, 1)
	}
	delete(w.nodes, number)
	delete(w.longLinks, number)
	delete(w.dirExtents, number)
	if n.xattrs != 0 {
		w.release(n.xattrs)
	}
	if n.kind() == TypeDir {
		*w.dirs.at(n.at) = directory{}
	}
	*n = inode{}
}
