package ext4

import (
	"math/bits"
	"slices"
)

// Finish writes the changes of the level. Afterwards the file system on the disk is complete, and
// Begin may start the next level.
func (w *Writer) Finish() error {
	slices.Sort(w.changedDirs)
	for _, number := range w.changedDirs {
		d := w.dirOf(number)
		if d == nil || !d.changed { // removed again, or listed twice
			continue
		}
		if err := w.writeDir(d); err != nil {
			return err
		}
	}
	w.changedDirs = w.changedDirs[:0]
	slices.Sort(w.changedSets)
	for _, id := range w.changedSets {
		if err := w.writeSet(w.sets.at(id)); err != nil {
			return err
		}
	}
	w.changedSets = w.changedSets[:0]
	if err := w.writeInodes(); err != nil {
		return err
	}
	if err := w.writeJournal(); err != nil {
		return err
	}
	return w.writeGroups()
}

// writeInodes writes the blocks of inode tables in which something changed.
func (w *Writer) writeInodes() error {
	for i, word := range w.touched {
		for ; word != 0; word &= word - 1 {
			block := uint32(i*64 + bits.TrailingZeros64(word))
			first := block*inodesPerBlock + 1
			p := w.scratch()
			for j := range min(inodesPerBlock, w.inodes.n-first) {
				w.putInode(p[j*inodeSize:][:inodeSize], first+j)
			}
			at := inodeTableAt(block/tableBlocks) + block%tableBlocks
			if err := w.emit(at, p); err != nil {
				return err
			}
		}
		w.touched[i] = 0
	}
	return nil
}

// grow adds groups until a quarter of the blocks and of the inodes is free.
func (w *Writer) grow() {
	w.groups = max(w.groups, minGroups)
	blocks := uint64(w.alloc.next)
	inodes := uint64(w.inodes.n)
	for w.groups < maxGroups && (4*blocks > 3*blocksPerGroup*uint64(w.groups) ||
		4*inodes > 3*inodesPerGroup*uint64(w.groups)) {
		w.groups += groupsPerFlex
	}
}

// writeGroups writes bitmaps, descriptors and superblocks. Copies of the last two are only written
// when groups were added: nothing reads the free counts in them.
func (w *Writer) writeGroups() error {
	before := w.groups
	w.grow()
	descs := make([]byte, descBlocks(w.groups)*BlockSize)
	var t totals
	for group := range w.groups {
		if err := w.putDesc(descs[group*descSize:][:descSize], group, &t); err != nil {
			return err
		}
	}
	for group := range w.groups {
		if !hasSuper(group) || group > 0 && w.groups == before {
			continue
		}
		block := group * blocksPerGroup
		p := w.scratch()
		if group == 0 {
			w.putSuper(p[1024:2048], group, t)
		} else {
			w.putSuper(p[:1024], group, t)
		}
		if err := w.emit(block, p); err != nil {
			return err
		}
		for i := range descBlocks(w.groups) {
			if err := w.emit(block+1+i, descs[i*BlockSize:][:BlockSize]); err != nil {
				return err
			}
		}
	}
	return nil
}
