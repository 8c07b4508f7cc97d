package upload

import (
	"net/http"
	"testing"

	"kubevirt.io/disk/disk/disktest/packtest"
)

// TestHostileDictionary: data that claims to need much memory is refused before memory is
// allocated.
func TestHostileDictionary(t *testing.T) {
	raw := rawDisk(1 << 20)
	for code, status := range map[byte]int{24: http.StatusCreated, // 16 MiB
		25: 422, 28: 422, 40: 422} {
		s := newServer(t)
		requireSays(t, s.put(t, "vm", packtest.XzNeeding(raw, code)), status)
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
