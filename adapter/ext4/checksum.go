package ext4

import (
	"encoding/binary"
	"hash/crc32"
)

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
