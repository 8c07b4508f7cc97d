package pages

import (
	"strconv"

	"kubevirt.io/disk/disk"
)

// gridColumns is how many cells a row of the large map has.
const gridColumns = 128

// mapPaths are the cells of a map as SVG paths, one for each state. A hole has none. They are lines
// with a height of one cell, so that the style sheet gives each state a width and a colour.
type mapPaths struct{ Image, Copied, Written, Read string }

// cellState is the state that is drawn for a cell. A guest's write always counts, however small; of
// the rest, the larger part counts.
func cellState(c disk.Cell) byte {
	switch {
	case c.Written > 0:
		return 'w'
	case c.Image == 0 && c.Copied == 0:
		return 'h'
	case c.Image >= c.Copied:
		return 'i'
	}
	return 'c'
}

// drawMap draws a map in rows of this many cells.
func drawMap(m *disk.Map, columns int) mapPaths {
	var image, copied, written, read path
	for from := 0; from < len(m.Cells); from += columns {
		row := m.Cells[from:min(from+columns, len(m.Cells))]
		y := from / columns
		for x := 0; x < len(row); {
			end, state := x+1, cellState(row[x])
			for end < len(row) && cellState(row[end]) == state {
				end++
			}
			switch state {
			case 'i':
				image.line(x, end, y)
			case 'c':
				copied.line(x, end, y)
			case 'w':
				written.line(x, end, y)
			}
			x = end
		}
		for x := 0; x < len(row); x++ {
			begin := x
			for x < len(row) && row[x].Read {
				x++
			}
			if begin < x {
				read.line(begin, x, y)
			}
		}
	}
	return mapPaths{string(image), string(copied), string(written), string(read)}
}

// path is the attribute "d" of an SVG path.
type path []byte

// line adds a line through the middle of cells.
func (p *path) line(x, end, row int) {
	b := append(*p, 'M')
	b = strconv.AppendInt(b, int64(x), 10)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(row), 10)
	b = append(b, ".5h"...)
	*p = strconv.AppendInt(b, int64(end-x), 10)
}

// chartHeight is half the height of a chart: reads go up from the middle, writes go down.
const chartHeight = 32

// drawArea draws values as an area above the middle of a chart, or below it.
func drawArea(values []float64, top float64, down bool) string {
	p := path("M0 ")
	p = strconv.AppendInt(p, chartHeight, 10)
	last, empty := int64(0), true
	for i, v := range values {
		y := int64(0)
		if top > 0 {
			y = int64(v/top*(chartHeight-1) + .5)
		}
		if v > 0 {
			y = max(y, 1) // show small values, too
		}
		if down {
			y = -y
		}
		empty = empty && y == 0
		if i == 0 {
			p = append(p, 'v')
			p = strconv.AppendInt(p, -y, 10)
		} else {
			p = append(p, "l1 "...)
			p = strconv.AppendInt(p, last-y, 10)
		}
		last = y
	}
	if empty {
		return ""
	}
	p = append(p, 'V')
	p = strconv.AppendInt(p, chartHeight, 10)
	return string(append(p, 'z'))
}
