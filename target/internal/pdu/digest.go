package pdu

import (
	"encoding/binary"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Digest is the CRC32C of the segments as if they were one (RFC 7143 13.1).
func Digest(segments ...[]byte) uint32 {
	var d uint32
	for _, s := range segments {
		d = crc32.Update(d, castagnoli, s)
	}
	return d
}

// UpdateDigest continues a digest; start with 0.
func UpdateDigest(d uint32, p []byte) uint32 { return crc32.Update(d, castagnoli, p) }

// PutDigest writes a digest as it is on the wire: the reflected CRC, lowest byte first (RFC 7143
// 13.1, appendix A).
func PutDigest(p []byte, d uint32) { binary.LittleEndian.PutUint32(p, d) }

// AppendDigest appends a digest in the same form.
func AppendDigest(dst []byte, d uint32) []byte { return binary.LittleEndian.AppendUint32(dst, d) }
