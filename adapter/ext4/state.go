package ext4

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Save writes the state that Load needs to continue after a level. It is called right after Finish.
// The caller adds a version and a checksum.
//
// All numbers except times are unsigned varints. In this order:
//
//	level, groups, the next block, how many inodes
//	bitmaps of groups    how many; each: 0, or 1 and a block
//	sets of attributes   how many; each: how many attributes, the attributes, and how many files
//	inodes               each: its mode; 0: free; otherwise attributes, and what depends on the type
//	known blocks         how many; each: the distance to the one before, and 16 bytes
func (w *Writer) Save(dst io.Writer) error {
	s := &saver{out: bufio.NewWriterSize(dst, 1<<16)}
	s.numbers(uint64(w.level), uint64(w.groups), uint64(w.alloc.next), uint64(w.inodes.n))
	s.numbers(uint64(len(w.alloc.bits)))
	for _, bitmap := range w.alloc.bits {
		s.flag(bitmap != nil)
		s.bytes(bitmap)
	}
	s.numbers(uint64(w.sets.n))
	for id := uint32(1); id < w.sets.n; id++ {
		s.set(w.sets.at(id), w.setIDs[w.sets.at(id).key] == id)
	}
	for number := uint32(1); number < w.inodes.n; number++ {
		s.inode(w, number)
	}
	s.numbers(uint64(w.known.n))
	before := uint32(0)
	for block, sum := range w.known.all() {
		s.numbers(uint64(block - before))
		s.bytes(sum[:])
		before = block
	}
	return s.out.Flush() // returns the first error of any write
}

// saver writes a state.
type saver struct {
	out     *bufio.Writer
	scratch [binary.MaxVarintLen64]byte
}

func (s *saver) numbers(all ...uint64) {
	for _, n := range all {
		s.bytes(binary.AppendUvarint(s.scratch[:0], n))
	}
}

func (s *saver) bytes(p []byte) { _, _ = s.out.Write(p) }

func (s *saver) flag(set bool) {
	if set {
		s.numbers(1)
	} else {
		s.numbers(0)
	}
}

func (s *saver) text(p string) {
	s.numbers(uint64(len(p)))
	_, _ = s.out.WriteString(p)
}

func (s *saver) set(set *xattrSet, newest bool) {
	s.numbers(uint64(len(set.attrs)))
	if len(set.attrs) == 0 {
		return
	}
	for _, x := range set.attrs {
		s.numbers(uint64(x.index))
		s.text(x.name)
		s.text(x.value)
	}
	s.numbers(uint64(set.block), uint64(set.files))
	s.flag(newest)
}

func (s *saver) inode(w *Writer, number uint32) {
	n := w.inodes.at(number)
	s.numbers(uint64(n.mode))
	if n.mode == 0 {
		return
	}
	s.numbers(n.size, uint64(n.nanos), uint64(n.uid), uint64(n.gid), uint64(n.links),
		uint64(n.xattrs))
	s.bytes(binary.AppendVarint(s.scratch[:0], n.seconds))
	if n.hasExtents() {
		s.extents(w.extentsOf(n))
		s.numbers(uint64(len(w.nodes[number])))
		for _, block := range w.nodes[number] {
			s.numbers(uint64(block))
		}
	}
	switch {
	case n.kind() == TypeLink:
		s.text(w.Target(Inode(number)))
	case n.kind() == TypeDir: // its names, and 0
		d := w.dirs.at(n.at)
		s.numbers(uint64(d.parent), uint64(d.blocks), uint64(d.subdirs))
		s.flag(d.indexed)
		for i := d.first; i != 0; {
			e := w.entries.at(i)
			s.numbers(uint64(e.inode), uint64(e.level), uint64(e.length))
			s.bytes(w.nameOf(e))
			i = e.next
		}
		s.numbers(0)
	}
}

func (s *saver) extents(all []extent) {
	s.numbers(uint64(len(all)))
	end := uint32(0)
	for _, e := range all {
		s.numbers(uint64(e.logical-end), uint64(e.start), uint64(e.length))
		end = e.logical + e.length
	}
}

// Load returns the Writer as it was when Save was called: the next level gets the same blocks from
// both.
func Load(src io.Reader) (*Writer, error) {
	w := empty()
	l := &loader{in: bufio.NewReaderSize(src, 1<<16), w: w}
	w.level = int(l.number(1<<16 - 1))
	w.groups = uint32(l.number(maxGroups))
	w.alloc.next = uint32(l.number(maxBlocks))
	l.inodes = l.number(maxGroups*inodesPerGroup + 1)
	w.alloc.bits = make([][]byte, l.number(maxGroups))
	for i := range w.alloc.bits {
		if l.number(1) == 1 {
			w.alloc.bits[i] = make([]byte, BlockSize)
			l.bytes(w.alloc.bits[i])
		}
	}
	for sets := l.number(maxXattrs); sets > 1 && l.err == nil; sets-- {
		l.set()
	}
	for number := uint64(1); number < l.inodes && l.err == nil; number++ {
		l.inode()
	}
	block := uint64(0)
	for known := l.number(maxBlocks); known > 0 && l.err == nil; known-- {
		block += l.number(maxBlocks - block)
		var sum blockSum
		l.bytes(sum[:])
		w.known.set(uint32(block), sum)
	}
	if l.err == nil && (l.inodes <= firstInode || w.dirOf(rootInode) == nil ||
		w.inodes.at(journalInode).extents != 1) {
		l.err = errors.New("it has no root, or no journal")
	}
	if l.err != nil {
		return nil, fmt.Errorf("this is not the state of a file system: %w", l.err)
	}
	return w, nil
}

// maxBlocks is how many blocks a file system may have.
const maxBlocks = maxGroups * blocksPerGroup

// loader reads a state. It checks every number against its limit, so that damaged data is an error.
type loader struct {
	in     *bufio.Reader
	w      *Writer
	inodes uint64 // how many there are, number 0 included
	err    error  // the first one
}

// number reads a number of at most limit. After an error it returns 0.
func (l *loader) number(limit uint64) uint64 {
	if l.err != nil {
		return 0
	}
	n, err := binary.ReadUvarint(l.in)
	if err == nil && n > limit {
		err = fmt.Errorf("%d is more than %d", n, limit)
	}
	if err != nil {
		l.err = err
		return 0
	}
	return n
}

func (l *loader) bytes(p []byte) {
	if l.err == nil {
		_, l.err = io.ReadFull(l.in, p)
	}
}

func (l *loader) text(limit uint64) string {
	p := make([]byte, l.number(limit))
	l.bytes(p)
	return string(p)
}

func (l *loader) set() {
	id := l.w.sets.add()
	attrs := make([]xattr, l.number(BlockSize))
	if len(attrs) == 0 {
		return
	}
	for i := range attrs {
		attrs[i] = xattr{byte(l.number(255)), l.text(maxXattrName), l.text(BlockSize)}
	}
	set := setOf(attrs)
	set.block, set.files = uint32(l.number(maxBlocks)), uint32(l.number(1<<31))
	if l.number(1) == 1 {
		l.w.setIDs[set.key] = id
	}
	l.w.xattrBytes += set.bytes
	*l.w.sets.at(id) = set
}

func (l *loader) inode() {
	const most = 1<<32 - 1
	w, number := l.w, l.w.inodes.add()
	n := w.inodes.at(number)
	if n.mode = uint16(l.number(1<<16 - 1)); n.mode == 0 {
		return
	}
	n.size, n.nanos = l.number(1<<64-1), uint32(l.number(most))
	n.uid, n.gid = uint32(l.number(most)), uint32(l.number(most))
	n.links, n.xattrs = uint32(l.number(most)), uint32(l.number(uint64(w.sets.n-1)))
	if l.err == nil {
		n.seconds, l.err = binary.ReadVarint(l.in)
	}
	floor := len(w.extents)
	if n.hasExtents() {
		l.extents()
		for nodes := l.number(maxBlocks); nodes > 0 && l.err == nil; nodes-- {
			w.nodes[number] = append(w.nodes[number], uint32(l.number(maxBlocks)))
		}
		n.at, n.extents = uint32(floor), uint32(len(w.extents)-floor)
	}
	switch {
	case n.shortLink():
		n.at = w.text.add(l.text(maxShortLink))
	case n.kind() == TypeLink:
		w.longLinks[number] = l.text(maxTarget)
		w.linkBytes += int(n.size)
	case n.kind() == TypeDir:
		n.at, n.extents = w.dirs.add(), 0
		d := w.dirs.at(n.at)
		*d = directory{inode: number}
		l.directory(d, slices.Clone(w.extents[floor:]))
		w.extents = w.extents[:floor]
	}
}

func (l *loader) extents() {
	end := uint64(0)
	for left := l.number(maxBlocks); left > 0 && l.err == nil; left-- {
		e := extent{uint32(end + l.number(maxBlocks)), uint32(l.number(maxBlocks)),
			uint32(l.number(maxExtent))}
		l.w.extents = append(l.w.extents, e)
		end = uint64(e.logical) + uint64(e.length)
	}
}

func (l *loader) directory(d *directory, extents []extent) {
	d.parent, d.blocks = uint32(l.number(l.inodes-1)), uint32(l.number(maxBlocks))
	l.w.setDirExtents(d, extents)
	d.subdirs = uint32(l.number(l.inodes))
	d.indexed = l.number(1) == 1
	for {
		number := uint32(l.number(l.inodes - 1))
		if number == 0 {
			return
		}
		level := uint16(l.number(1<<16 - 1))
		if name := l.text(maxName); l.err == nil {
			l.w.insert(d, name, number, level)
		}
	}
}
