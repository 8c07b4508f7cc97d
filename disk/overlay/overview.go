package overlay

import (
	"time"

	"kubevirt.io/disk/disk"
)

// Map shows what is still in the image, and what the disk's own file has. See Mapper.
func (o *Disk) Map() *disk.Map {
	m := o.mapOfFile()
	for i := range m.Cells {
		c := &m.Cells[i]
		off, length := m.Range(i)
		c.Image = min(o.inImage(off, length), length)
		// Content in the image is a hole of the file, unless the file knows only that something
		// near it was written.
		hole := min(c.Image, c.Hole)
		c.Hole -= hole
		c.Copied -= c.Image - hole
	}
	o.trail.Mark(m, time.Now())
	return m
}

// mapOfFile is the map of the disk's own file.
func (o *Disk) mapOfFile() *disk.Map {
	if file, ok := o.file.(disk.Mapper); ok {
		return file.Map()
	}
	m := disk.NewMap(o.Size())
	for i := range m.Cells {
		_, m.Cells[i].Copied = m.Range(i)
	}
	return m
}

// inImage returns how many bytes of a range only the image has, in whole blocks.
func (o *Disk) inImage(off, length int64) int64 {
	first, last := o.span(off, length)
	if first > last {
		return 0
	}
	return o.blocks.countClear(first, last) * o.granule
}
