package upload

import (
	"encoding/binary"
	"hash/crc32"
	"net/http"
	"testing"
)

// xzOf makes an xz file whose data is stored and not compressed, as the format allows.
func xzOf(data []byte) []byte { return xzWith(data, 22) } // 8 MiB

// xzWith makes an xz file that claims to need a dictionary of the size with this code.
func xzWith(data []byte, dictionary byte) []byte {
	le := binary.LittleEndian
	sum := func(p []byte) []byte { return le.AppendUint32(nil, crc32.ChecksumIEEE(p)) }
	flags := []byte{0, 1} // CRC32
	out := append([]byte("\xfd7zXZ\x00"), flags...)
	out = append(out, sum(flags)...)

	begin := len(out)
	header := []byte{2, 0, 0x21, 1, dictionary, 0, 0, 0}
	out = append(append(out, header...), sum(header)...)
	kind := byte(1) // resets the dictionary
	for rest := data; len(rest) > 0; kind = 2 {
		n := min(len(rest), 1<<16)
		out = append(out, kind, byte((n-1)>>8), byte(n-1))
		out, rest = append(out, rest[:n]...), rest[n:]
	}
	out = append(out, 0)
	unpadded := len(out) - begin + 4
	for (len(out)-begin)%4 != 0 {
		out = append(out, 0)
	}
	out = append(out, sum(data)...)

	index := []byte{0, 1}
	index = binary.AppendUvarint(index, uint64(unpadded))
	index = binary.AppendUvarint(index, uint64(len(data)))
	for len(index)%4 != 0 {
		index = append(index, 0)
	}
	index = append(index, sum(index)...)
	out = append(out, index...)
	tail := append(le.AppendUint32(nil, uint32(len(index)/4-1)), flags...)
	out = append(append(out, sum(tail)...), tail...)
	return append(out, 'Y', 'Z')
}

// TestHostileDictionary: data that claims to need much memory is refused before memory is
// allocated.
func TestHostileDictionary(t *testing.T) {
	raw := rawDisk(1 << 20)
	for code, status := range map[byte]int{24: http.StatusCreated, // 16 MiB
		25: 422, 28: 422, 40: 422} {
		s := newServer(t)
		requireSays(t, s.put(t, "vm", xzWith(raw, code)), status)
		if status != http.StatusCreated {
			s.requireNone(t, "vm")
		}
	}
	// A frame of zstd with a window of 3.75 TiB (RFC 8878 3.1.1.1.2).
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 1, 0, 0}
	s := newServer(t)
	requireSays(t, s.put(t, "vm", append(frame, make([]byte, 8<<10)...)), 422, "MiB of memory")
	s.requireNone(t, "vm")
}
