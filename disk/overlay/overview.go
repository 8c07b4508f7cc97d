package overlay

import (
	"time"

	"kubevirt.io/disk/disk"
)

// Map shows which content only the image has, and which the disk's own files have. See Mapper.
func (o *Disk) Map() *disk.Map {
	m := o.cells()
	o.trail.Mark(m, time.Now())
	return m
}

// cells is the Map without the guest's work.
func (o *Disk) cells() *disk.Map {
	m := o.mapOfFile()
	var lower *disk.Map
	if below := o.lower.Load(); below != nil {
		lower = below.cells()
	}
	for i := range m.Cells {
		c := &m.Cells[i]
		off, length := m.Range(i)
		below := min(o.inImage(off, length), length)
		// Content below is a hole of the file. But the file may know only that something was
		// written near it.
		hole := min(below, c.Hole)
		c.Hole -= hole
		c.Copied -= below - hole
		if lower == nil {
			c.Image = below
		} else {
			addBelow(c, lower, off, below)
		}
	}
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

// addBelow adds content of the layers below to a cell that begins at off. They have that many bytes
// of the cell. It is unknown which bytes, so it adds them in proportion.
func addBelow(c *disk.Cell, lower *disk.Map, off, bytes int64) {
	if bytes == 0 {
		return
	}
	end := off + c.Image + c.Copied + c.Hole + bytes
	var sum disk.Cell
	for i := off / lower.CellBytes; i < int64(len(lower.Cells)) && i*lower.CellBytes < end; i++ {
		sum.Image += lower.Cells[i].Image
		sum.Copied += lower.Cells[i].Copied
		sum.Hole += lower.Cells[i].Hole
	}
	total := float64(max(1, sum.Image+sum.Copied+sum.Hole))
	image := int64(float64(bytes) * float64(sum.Image) / total)
	copied := min(int64(float64(bytes)*float64(sum.Copied)/total), bytes-image)
	c.Image += image
	c.Copied += copied
	c.Hole += bytes - image - copied
}
