package ext4

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
)

// A block of a directory has entries, and ends with a checksum that looks like an entry without a
// name.
const (
	dirTail  = 12
	dirRoom  = BlockSize - dirTail
	dotBytes = 12 // of "." and of ".."

	// leafFill is the filled part of the leaves of a new index. A guest can add some names before
	// it has to split a leaf.
	leafFill = dirRoom * 9 / 10

	indexRoot  = 32 // where an index begins in the first block
	indexNode  = 8  // and in other blocks
	indexEntry = 8
	rootLimit  = (BlockSize - indexRoot - indexEntry) / indexEntry
	nodeLimit  = (BlockSize - indexNode - indexEntry) / indexEntry
)

var errDirFull = errors.New("a directory has too many names for an index of two levels")

// entryLength is how many bytes of a block a name takes.
func entryLength(name int) uint64 { return uint64(8+name+3) &^ 3 }

// fileTypes are the types of files as directories store them (the feature filetype).
var fileTypes = [16]byte{TypeFile >> 12: 1, TypeDir >> 12: 2, TypeChar >> 12: 3,
	TypeBlock >> 12: 4, TypeFIFO >> 12: 5, TypeSocket >> 12: 6, TypeLink >> 12: 7}

// dirName is an entry of a directory that is being written. It is small, because a directory may
// have a million.
type dirName struct {
	hash  uint32
	entry uint32
}

// writeDir writes the blocks of a directory. A directory of one block has its names in the order in
// which they were made. A larger one has an index, and leaves of names sorted by their hash.
func (w *Writer) writeDir(d *directory) error {
	d.changed = false
	d.indexed = d.bytes+2*dotBytes > dirRoom
	if !d.indexed {
		if err := w.mapDir(d, 1); err != nil {
			return err
		}
		p := w.scratch()
		at, last := w.putDots(p, d), dotBytes
		for i := d.first; i != 0; i = w.entries.at(i).next {
			at, last = w.putEntry(p, at, i), at
		}
		extendLast(p, last)
		return w.emitDir(d, 0, p)
	}
	count := 0
	for i := d.first; i != 0; i = w.entries.at(i).next {
		count++
	}
	names := make([]dirName, 0, count)
	for i := d.first; i != 0; i = w.entries.at(i).next {
		names = append(names, dirName{nameHash(w.nameOf(w.entries.at(i))), i})
	}
	slices.SortFunc(names, func(a, b dirName) int {
		if c := cmp.Compare(a.hash, b.hash); c != 0 {
			return c
		}
		return bytes.Compare(w.nameOf(w.entries.at(a.entry)), w.nameOf(w.entries.at(b.entry)))
	})
	return w.writeIndexed(d, w.splitLeaves(names))
}

// splitLeaves cuts sorted names into leaves.
func (w *Writer) splitLeaves(names []dirName) (leaves [][]dirName) {
	begin, length := 0, uint64(0)
	for i := range names {
		n := entryLength(int(w.entries.at(names[i].entry).length))
		if length+n > leafFill {
			leaves = append(leaves, names[begin:i])
			begin, length = i, 0
		}
		length += n
	}
	return append(leaves, names[begin:])
}

// leafHash is the smallest hash of the names in a leaf. Its lowest bit says that the leaf before
// has names with the same hash.
func leafHash(leaves [][]dirName, i int) uint32 {
	first := leaves[i][0].hash
	if before := leaves[i-1]; before[len(before)-1].hash == first {
		first |= 1
	}
	return first
}

// writeIndexed writes a directory with an index: its root, nodes if the root has no room for all
// leaves, and the leaves.
func (w *Writer) writeIndexed(d *directory, leaves [][]dirName) error {
	nodes := 0
	if len(leaves) > rootLimit {
		nodes = (len(leaves) + nodeLimit - 1) / nodeLimit
	}
	if nodes > rootLimit {
		return errDirFull
	}
	if err := w.mapDir(d, uint32(1+nodes+len(leaves))); err != nil {
		return err
	}
	index := make([]indexed, len(leaves)) // of the leaves
	for i := range leaves {
		index[i].block = uint32(1 + nodes + i)
		if i > 0 {
			index[i].hash = leafHash(leaves, i)
		}
	}
	top := index
	if nodes > 0 {
		top = nil
		for i := 0; i < len(index); i += nodeLimit {
			top = append(top, indexed{index[i].hash, uint32(1 + len(top))})
		}
	}
	if err := w.writeIndexRoot(d, top, nodes > 0); err != nil {
		return err
	}
	for i := range nodes {
		part := index[i*nodeLimit : min((i+1)*nodeLimit, len(index))]
		p := w.scratch()
		binary.LittleEndian.PutUint16(p[4:], BlockSize) // empty, for readers without indexes
		w.putIndex(p, d, indexNode, nodeLimit, part)
		if err := w.emit(w.blockOf(d, uint32(1+i)), p); err != nil {
			return err
		}
	}
	for i, leaf := range leaves {
		p, at, last := w.scratch(), 0, 0
		for _, n := range leaf {
			at, last = w.putEntry(p, at, n.entry), at
		}
		extendLast(p, last)
		if err := w.emitDir(d, uint32(1+nodes+i), p); err != nil {
			return err
		}
	}
	return nil
}

// indexed is an entry of an index: names with this hash or a larger one start in that block.
type indexed struct{ hash, block uint32 }

func (w *Writer) writeIndexRoot(d *directory, index []indexed, nodes bool) error {
	le := binary.LittleEndian
	p := w.scratch()
	w.putDots(p, d)
	le.PutUint16(p[dotBytes+4:], BlockSize-dotBytes) // ".." hides the index
	p[28] = hashHalfMD4
	p[29] = 8 // length of this description
	if nodes {
		p[30] = 1
	}
	w.putIndex(p, d, indexRoot, rootLimit, index)
	return w.emit(w.blockOf(d, 0), p)
}

// putIndex writes an index at an offset. Its first entry has the number of entries in place of a
// hash.
func (w *Writer) putIndex(p []byte, d *directory, at, limit int, index []indexed) {
	le := binary.LittleEndian
	for i, e := range index {
		le.PutUint32(p[at+i*indexEntry:], e.hash)
		le.PutUint32(p[at+i*indexEntry+4:], e.block)
	}
	le.PutUint16(p[at:], uint16(limit))
	le.PutUint16(p[at+2:], uint16(len(index)))
	tail := at + limit*indexEntry // 4 reserved bytes, and the checksum
	sum := crc32c(inodeSeed(d.inode), p[:at+len(index)*indexEntry])
	sum = crc32c(sum, p[tail:tail+4])
	sum = crc32cNumber(sum, 0)
	le.PutUint32(p[tail+4:], sum)
}

// putDots writes "." and "..", and returns where the next entry goes.
func (w *Writer) putDots(p []byte, d *directory) int {
	putName(p, d.inode, ".", dotBytes, fileTypes[TypeDir>>12])
	putName(p[dotBytes:], d.parent, "..", dotBytes, fileTypes[TypeDir>>12])
	return 2 * dotBytes
}

func putName[T string | []byte](p []byte, inode uint32, name T, length int, kind byte) {
	binary.LittleEndian.PutUint32(p, inode)
	binary.LittleEndian.PutUint16(p[4:], uint16(length))
	p[6], p[7] = byte(len(name)), kind
	copy(p[8:], name)
}

// putEntry writes an entry, and returns where the next one goes.
func (w *Writer) putEntry(p []byte, at int, i uint32) int {
	e := w.entries.at(i)
	length := int(entryLength(int(e.length)))
	putName(p[at:], e.inode, w.nameOf(e), length, fileTypes[w.inodes.at(e.inode).mode>>12])
	return at + length
}

// extendLast extends the last entry of a block, which begins at offset last, to the tail.
func extendLast(p []byte, last int) {
	binary.LittleEndian.PutUint16(p[last+4:], uint16(dirRoom-last))
}

// emitDir writes a block of entries, with its checksum.
func (w *Writer) emitDir(d *directory, logical uint32, p []byte) error {
	le := binary.LittleEndian
	le.PutUint16(p[dirRoom+4:], dirTail)
	p[dirRoom+7] = 0xde
	le.PutUint32(p[dirRoom+8:], crc32c(inodeSeed(d.inode), p[:dirRoom]))
	return w.emit(w.blockOf(d, logical), p)
}

// blockOf returns the disk block of a block of the directory.
func (w *Writer) blockOf(d *directory, logical uint32) uint32 {
	all := w.dirExtents[d.inode]
	if all == nil {
		return d.start + logical
	}
	i, found := slices.BinarySearchFunc(all, logical, func(e extent, logical uint32) int {
		return cmp.Compare(e.logical, logical)
	})
	if !found {
		i--
	}
	return all[i].start + logical - all[i].logical
}

// mapDir gives the directory as many blocks as it needs.
func (w *Writer) mapDir(d *directory, blocks uint32) error {
	if d.blocks == blocks {
		return nil
	}
	all := w.dirExtentsOf(d)
	for d.blocks < blocks {
		start, got, err := w.alloc.take(blocks - d.blocks)
		if err != nil {
			return err
		}
		all = addExtent(all, 0, extent{d.blocks, start, got})
		d.blocks += got
	}
	for d.blocks > blocks {
		last := &all[len(all)-1]
		n := min(last.length, d.blocks-blocks)
		w.alloc.freeRun(last.start+last.length-n, n)
		d.blocks -= n
		if last.length -= n; last.length == 0 {
			all = all[:len(all)-1]
		}
	}
	w.setDirExtents(d, all)
	w.inodes.at(d.inode).size = uint64(blocks) * BlockSize
	w.touch(d.inode)
	return w.writeNodes(d.inode, all)
}
