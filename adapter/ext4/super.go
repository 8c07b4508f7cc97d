package ext4

import "encoding/binary"

// The features, as they are in the superblock.
const (
	compatJournal   = 0x4
	compatXattr     = 0x8
	compatDirIndex  = 0x20
	incompatTypes   = 0x2
	incompatExtents = 0x40
	incompat64Bit   = 0x80
	incompatFlex    = 0x200
	incompatSeed    = 0x2000 // metadata_csum_seed
	roSparseSuper   = 0x1
	roLargeFile     = 0x2
	roDirLinks      = 0x20 // dir_nlink
	roExtraInode    = 0x40
	roChecksums     = 0x400

	superMagic    = 0xef53
	hashHalfMD4   = 1
	unsignedHash  = 2 // in s_flags: the same on all processors
	userAttrsACLs = 0xc

	// madeAt is the creation time of every file system, 2020-01-01, in seconds since 1970.
	madeAt = 1577836800
)

// totals are the sums over all groups.
type totals struct{ freeBlocks, freeInodes uint32 }

// putSuper writes the superblock, or its copy in a group.
func (w *Writer) putSuper(p []byte, group uint32, t totals) {
	le := binary.LittleEndian
	blocks := uint64(w.groups) * blocksPerGroup
	for off, n := range map[int]uint32{
		0: w.groups * inodesPerGroup, 4: uint32(blocks), 12: t.freeBlocks, 16: t.freeInodes,
		24: 2, 28: 2, // blocks of 1 KiB << 2
		32: blocksPerGroup, 36: blocksPerGroup, 40: inodesPerGroup,
		48: madeAt, 64: madeAt, 264: madeAt,
		76: 1, 84: firstInode, // of the version with larger inodes
		92:  compatJournal | compatXattr | compatDirIndex,
		96:  incompatTypes | incompatExtents | incompat64Bit | incompatFlex | incompatSeed,
		100: roSparseSuper | roLargeFile | roDirLinks | roExtraInode | roChecksums,
		224: journalInode, 256: userAttrsACLs, 336: uint32(blocks >> 32), 352: unsignedHash,
		624: checksumSeed,
	} {
		le.PutUint32(p[off:], n)
	}
	for off, n := range map[int]uint16{
		54: 0xffff, // no check after a number of mounts
		56: superMagic, 58: 1, 60: 1, 88: inodeSize, 90: uint16(group), 254: descSize,
		348: extraSize, 350: extraSize,
	} {
		le.PutUint16(p[off:], n)
	}
	copy(p[104:], fixedUUID[:])
	for i, n := range hashSeed {
		le.PutUint32(p[236+4*i:], n)
	}
	p[252] = hashHalfMD4
	p[372] = flexBits
	p[373] = 1 // crc32c
	w.putJournalCopy(p[268:])
	p[253] = 1 // the copy of the journal inode is valid
	le.PutUint32(p[1020:], crc32c(^uint32(0), p[:1020]))
}

// putJournalCopy writes a copy of the journal's inode into the superblock, as a backup.
func (w *Writer) putJournalCopy(p []byte) {
	n := w.inodes.at(journalInode)
	putRoot(p[:60], w.extentsOf(n), nil)
	binary.LittleEndian.PutUint32(p[60:], uint32(n.size>>32))
	binary.LittleEndian.PutUint32(p[64:], uint32(n.size))
}

// writeJournal writes the superblock of an empty journal (JBD2, big-endian).
func (w *Writer) writeJournal() error {
	be := binary.BigEndian
	p := w.scratch()
	be.PutUint32(p[0:], 0xc03b3998)
	be.PutUint32(p[4:], 4) // a superblock of version 2
	be.PutUint32(p[12:], BlockSize)
	be.PutUint32(p[16:], journalBlocks)
	be.PutUint32(p[20:], 1) // first block of the log
	be.PutUint32(p[24:], 1) // first transaction
	be.PutUint32(p[64:], 1) // users
	return w.emit(w.extentsOf(w.inodes.at(journalInode))[0].start, p)
}

// The flags of a group's descriptor.
const (
	groupNoInodes    = 1 // INODE_UNINIT
	groupNoBlocks    = 2 // BLOCK_UNINIT
	groupZeroedTable = 4 // INODE_ZEROED
)

func (w *Writer) putDesc(p []byte, group uint32, t *totals) error {
	le := binary.LittleEndian
	flags := uint16(groupZeroedTable)
	le.PutUint32(p[0:], blockBitmapAt(group))
	le.PutUint32(p[4:], inodeBitmapAt(group))
	le.PutUint32(p[8:], inodeTableAt(group))

	bitmap := w.scratch()
	free := blocksPerGroup - w.alloc.full(bitmap, group, w.groups)
	le.PutUint16(p[12:], uint16(free))
	// A group with tables of other groups needs a bitmap, because a guest that makes a missing
	// bitmap does not know of these tables. And e2fsck expects one in the last group.
	if w.alloc.touched(group) || group%groupsPerFlex == 0 || group == w.groups-1 {
		sum := crc32c(checksumSeed, bitmap)
		le.PutUint16(p[24:], uint16(sum))
		le.PutUint16(p[56:], uint16(sum>>16))
		if err := w.emit(blockBitmapAt(group), bitmap); err != nil {
			return err
		}
	} else {
		flags |= groupNoBlocks
	}

	first := group*inodesPerGroup + 1
	freeInodes, unused, dirs := uint32(inodesPerGroup), uint32(inodesPerGroup), uint16(0)
	if first < w.inodes.n {
		bitmap = w.scratch()
		freeInodes, dirs = w.inodeBitmap(bitmap, first)
		unused -= min(inodesPerGroup, w.inodes.n-first)
		sum := crc32c(checksumSeed, bitmap[:inodesPerGroup/8])
		le.PutUint16(p[26:], uint16(sum))
		le.PutUint16(p[58:], uint16(sum>>16))
		if err := w.emit(inodeBitmapAt(group), bitmap); err != nil {
			return err
		}
	} else {
		flags |= groupNoInodes
	}
	le.PutUint16(p[14:], uint16(freeInodes))
	le.PutUint16(p[16:], dirs)
	le.PutUint16(p[18:], flags)
	le.PutUint16(p[28:], uint16(unused))
	le.PutUint16(p[30:], uint16(crc32c(crc32cNumber(checksumSeed, group), p[:descSize])))
	t.freeBlocks += free
	t.freeInodes += freeInodes
	return nil
}

// inodeBitmap fills p with the inodes of a group that are in use.
func (w *Writer) inodeBitmap(p []byte, first uint32) (free uint32, dirs uint16) {
	free = inodesPerGroup
	for i := range min(inodesPerGroup, w.inodes.n-first) {
		n := w.inodes.at(first + i)
		if n.mode == 0 && first+i >= firstInode {
			continue
		}
		p[i/8] |= 1 << (i % 8)
		free--
		if n.kind() == TypeDir {
			dirs++
		}
	}
	for i := inodesPerGroup / 8; i < BlockSize; i++ {
		p[i] = 0xff
	}
	return free, dirs
}
