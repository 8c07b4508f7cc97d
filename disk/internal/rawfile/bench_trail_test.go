package rawfile

import (
	"testing"
	"time"
)

// BenchmarkTrail measures what the map of a disk costs each read and write of a guest, while nobody
// looks at it, and while somebody does.
func BenchmarkTrail(b *testing.B) {
	const size = 64 << 30
	for _, c := range []struct {
		name string
		look bool
		do   func(t *Trail, off int64)
	}{
		{"read", false, func(t *Trail, off int64) { t.Read(off, 4096) }},
		{"read, watched", true, func(t *Trail, off int64) { t.Read(off, 4096) }},
		{"write", false, func(t *Trail, off int64) { t.Write(off, 4096) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			t := NewTrail(func() int64 { return size })
			if c.look {
				t.recent(size, time.Now())
			}
			off := int64(0)
			for b.Loop() {
				c.do(t, off)
				off = (off + 40961<<12) % size
			}
		})
	}
}
