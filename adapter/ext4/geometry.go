package ext4

import (
	"encoding/binary"
	"hash/crc32"
)

const (
	// BlockSize is the length of a block in bytes.
	BlockSize = 4096

	blocksPerGroup = 8 * BlockSize // bits in a bitmap of one block
	inodesPerGroup = 8192
	inodeSize      = 256
	inodesPerBlock = BlockSize / inodeSize
	tableBlocks    = inodesPerGroup / inodesPerBlock // of the inode table of a group

	flexBits      = 4
	groupsPerFlex = 1 << flexBits
	flexBlocks    = groupsPerFlex * (2 + tableBlocks) // the tables of sixteen groups

	descSize      = 64
	descsPerBlock = BlockSize / descSize
	// headBlocks is the reserved space at the beginning of a group with a superblock: room for the
	// descriptors of the largest number of groups.
	headBlocks = 128
	maxGroups  = (headBlocks - 1) * descsPerBlock // somewhat less than 1 TiB

	minGroups     = 64 // 8 GiB
	journalBlocks = 8192

	rootInode    = 2
	bootInode    = 5 // of the kernel's EXT4_IOC_SWAP_BOOT: a file without a name
	journalInode = 8
	firstInode   = 11 // of lost+found; those before it are reserved
)

// BootOffset is where each file system has BootSize bytes of zeros for data that is read before the
// file system is mounted. They belong to a file without a name, so writing there changes nothing
// else.
const (
	BootOffset = (headBlocks + flexBlocks + journalBlocks) * BlockSize
	BootSize   = 1 << 20
)

// hasSuper reports whether a group begins with a superblock (sparse_super).
func hasSuper(group uint32) bool {
	if group <= 1 {
		return true
	}
	for _, base := range [...]uint32{3, 5, 7} {
		n := base
		for n < group {
			n *= base
		}
		if n == group {
			return true
		}
	}
	return false
}

// headLength is how many blocks at the beginning of a group are never data.
func headLength(group uint32) uint32 {
	n := uint32(0)
	if hasSuper(group) {
		n = headBlocks
	}
	if group%groupsPerFlex == 0 {
		n += flexBlocks
	}
	return n
}

// flexStart is the first block of the tables that a group shares with its neighbours.
func flexStart(group uint32) uint32 {
	first := group &^ (groupsPerFlex - 1)
	start := first * blocksPerGroup
	if hasSuper(first) {
		start += headBlocks
	}
	return start
}

func blockBitmapAt(group uint32) uint32 { return flexStart(group) + group%groupsPerFlex }

func inodeBitmapAt(group uint32) uint32 {
	return flexStart(group) + groupsPerFlex + group%groupsPerFlex
}

func inodeTableAt(group uint32) uint32 {
	return flexStart(group) + 2*groupsPerFlex + group%groupsPerFlex*tableBlocks
}

// descBlocks returns how many blocks the descriptors of this many groups take.
func descBlocks(groups uint32) uint32 { return (groups + descsPerBlock - 1) / descsPerBlock }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32c continues a checksum as the kernel does: without inverting it before or after.
func crc32c(sum uint32, p []byte) uint32 { return ^crc32.Update(^sum, castagnoli, p) }

func crc32cNumber(sum, n uint32) uint32 {
	return crc32c(sum, binary.LittleEndian.AppendUint32(nil, n))
}

// checksumSeed begins every checksum except the superblock's. It is stored in the superblock
// (metadata_csum_seed), so that the UUID can be changed without rewriting all checksums.
const checksumSeed = 0x6b76646b

// inodeSeed begins the checksums of the structures of an inode. The generation of all inodes is 0.
func inodeSeed(ino uint32) uint32 { return crc32cNumber(crc32cNumber(checksumSeed, ino), 0) }
