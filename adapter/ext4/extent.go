package ext4

import "encoding/binary"

// extent maps blocks of a file to blocks of the disk.
type extent struct {
	logical, start, length uint32
}

const (
	maxExtent    = 32768 // blocks of an extent that is initialized
	rootExtents  = 4     // entries in an inode
	nodeExtents  = (BlockSize - extentHeader - 4) / extentEntry
	extentHeader = 12
	extentEntry  = 12
	extentMagic  = 0xf30a
)

// addExtent appends blocks to the extents of a file, and extends the last extent if it can. The
// first floor extents belong to other files.
func addExtent(all []extent, floor int, e extent) []extent {
	if last := len(all) - 1; last >= floor {
		l := &all[last]
		if l.logical+l.length == e.logical && l.start+l.length == e.start {
			more := min(e.length, maxExtent-l.length)
			l.length += more
			e = extent{e.logical + more, e.start + more, e.length - more}
		}
	}
	if e.length == 0 {
		return all
	}
	return append(all, e)
}

// extentsOf are the extents of a file.
func (w *Writer) extentsOf(n *inode) []extent {
	if n.kind() == TypeDir {
		return w.dirExtentsOf(w.dirs.at(n.at))
	}
	return w.extents[n.at : n.at+n.extents]
}

func (w *Writer) dirExtentsOf(d *directory) []extent {
	if all := w.dirExtents[d.inode]; all != nil || d.blocks == 0 {
		return all
	}
	return []extent{{0, d.start, d.blocks}}
}

// setDirExtents replaces the extents of a directory.
func (w *Writer) setDirExtents(d *directory, all []extent) {
	if len(all) > 1 {
		w.dirExtents[d.inode] = all
		return
	}
	delete(w.dirExtents, d.inode)
	if len(all) == 1 {
		d.start = all[0].start
	}
}

// nodesNeeded returns how many blocks a tree of this many extents has besides its root.
func nodesNeeded(extents int) (nodes int) {
	for n := extents; n > rootExtents; {
		n = (n + nodeExtents - 1) / nodeExtents
		nodes += n
	}
	return nodes
}

// putHeader begins a node of the tree.
func putHeader(p []byte, entries, room, depth int) {
	le := binary.LittleEndian
	le.PutUint16(p[0:], extentMagic)
	le.PutUint16(p[2:], uint16(entries))
	le.PutUint16(p[4:], uint16(room))
	le.PutUint16(p[6:], uint16(depth))
}

// putEntries writes the entries of a node: extents at depth 0, and otherwise nodes below it, as
// extents that start at the block of the node.
func putEntries(p []byte, entries []extent, depth int) {
	le := binary.LittleEndian
	for i, e := range entries {
		at := p[extentHeader+i*extentEntry:]
		le.PutUint32(at, e.logical)
		if depth == 0 {
			le.PutUint16(at[4:], uint16(e.length))
			le.PutUint32(at[8:], e.start)
		} else {
			le.PutUint32(at[4:], e.start)
		}
	}
}

// levelAbove makes the entries of the level above a level of the tree, whose nodes are in these
// blocks.
func levelAbove(entries []extent, blocks []uint32) []extent {
	var above []extent
	for i := 0; i < len(entries); i += nodeExtents {
		above = append(above, extent{logical: entries[i].logical, start: blocks[len(above)]})
	}
	return above
}

// putRoot writes the root of a tree into an inode. nodes are the blocks of its other nodes, from
// the leaves up.
func putRoot(p []byte, extents []extent, nodes []uint32) {
	entries, depth := extents, 0
	for ; len(entries) > rootExtents; depth++ {
		above := levelAbove(entries, nodes)
		entries, nodes = above, nodes[len(above):]
	}
	putHeader(p, len(entries), rootExtents, depth)
	putEntries(p, entries, depth)
}

// writeNodes writes the nodes of a file's tree below its root. It allocates or frees blocks when
// their number changes.
func (w *Writer) writeNodes(number uint32, extents []extent) error {
	need, nodes := nodesNeeded(len(extents)), w.nodes[number]
	if need == 0 && nodes == nil {
		return nil
	}
	for len(nodes) < need {
		start, _, err := w.alloc.take(1)
		if err != nil {
			return err
		}
		nodes = append(nodes, start)
	}
	for len(nodes) > need {
		w.alloc.free(nodes[len(nodes)-1], 1)
		nodes = nodes[:len(nodes)-1]
	}
	if need == 0 {
		delete(w.nodes, number)
		return nil
	}
	w.nodes[number] = nodes
	entries := extents
	for depth := 0; len(entries) > rootExtents; depth++ {
		above := levelAbove(entries, nodes)
		for i := range above {
			part := entries[i*nodeExtents : min((i+1)*nodeExtents, len(entries))]
			if err := w.writeNode(number, nodes[i], part, depth); err != nil {
				return err
			}
		}
		entries, nodes = above, nodes[len(above):]
	}
	return nil
}

func (w *Writer) writeNode(number, block uint32, entries []extent, depth int) error {
	p := w.scratch()
	putHeader(p, len(entries), nodeExtents, depth)
	putEntries(p, entries, depth)
	tail := BlockSize - 4
	binary.LittleEndian.PutUint32(p[tail:], crc32c(inodeSeed(number), p[:tail]))
	return w.emit(block, p)
}
