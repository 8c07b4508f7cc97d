package rawfile

import (
	"time"

	"kubevirt.io/disk/disk"
)

var _ disk.Mapper = (*File)(nil)

// Map shows what is stored in the file. If others may change the file, it is the image itself, and
// the first call asks the file system. See Mapper.
func (f *File) Map() *disk.Map {
	m := disk.NewMap(f.Size())
	holes := f.holes
	if holes == nil {
		if holes = f.seen.Load(); holes == nil {
			holes = newHoleMap(f)
			f.seen.Store(holes)
		}
	}
	for i := range m.Cells {
		off, length := m.Range(i)
		stored := holes.written.bytes(off, length)
		m.Cells[i] = disk.Cell{Copied: stored, Hole: length - stored}
	}
	f.trail.Mark(m, time.Now())
	if !f.opt.Private {
		for i := range m.Cells {
			c := &m.Cells[i]
			c.Image, c.Copied = c.Copied, 0
		}
	}
	return m
}
