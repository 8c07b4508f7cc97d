package overlay

import (
	"math/bits"
	"sync/atomic"
)

// indexFrom is how many layers must be below one to make an index worth its memory.
const indexFrom = 2

// maxIndexed is the most layers that an index can tell apart.
const maxIndexed = 255

// index says which of the layers below another one has a block, so that a read through ten layers
// looks at two places instead of eleven. It takes a byte for each block, in pages that are made
// when somebody reads there: 32 KiB for 128 MiB of a disk. What it says of layers above the bottom
// does not change; the bottom is asked. A reader that still has the index of former layers finds
// them closed, and begins again.
type index struct {
	layers []*Disk // the nearest first, and the bottom last
	blocks int64   // that it knows; the others are looked for in each layer
	pages  []atomic.Pointer[indexPage]
}

// indexPage has for each block which of the layers has it.
type indexPage [mapPageBlocks]uint8

// Index makes an index of the layers below, if there are enough of them. After each change of these
// it must be made again.
func (o *Disk) Index() {
	x := &index{blocks: o.floor / o.granule}
	for l := o.lower.Load(); l != nil; l = l.lower.Load() {
		x.layers = append(x.layers, l)
		if l.lower.Load() == nil {
			break
		}
		if l.granule != o.granule {
			x.blocks = 0
		}
		x.blocks = min(x.blocks, l.floor/l.granule)
	}
	if len(x.layers) < indexFrom || len(x.layers) > maxIndexed || x.blocks == 0 {
		o.index.Store(nil)
		return
	}
	x.pages = make([]atomic.Pointer[indexPage], (x.blocks+mapPageBlocks-1)/mapPageBlocks)
	o.index.Store(x)
}

// page returns a page, and makes it if need be.
func (x *index) page(i int64) *indexPage {
	if p := x.pages[i].Load(); p != nil {
		return p
	}
	p := new(indexPage)
	last := len(x.layers) - 1
	for b := range p {
		p[b] = uint8(last)
	}
	for l := last - 1; l >= 0; l-- {
		m := x.layers[l].blocks
		if i >= int64(len(m.pages)) || m.pages[i].Load() == nil {
			continue
		}
		for w := range int64(mapPageWords) {
			for word := m.word(i*mapPageWords + w); word != 0; word &= word - 1 {
				p[w*64+int64(bits.TrailingZeros64(word))] = uint8(l)
			}
		}
	}
	x.pages[i].Store(p)
	return p
}

// find is Disk.find for what the layer above does not have. The blocks are those of that layer.
func (x *index) find(off, length, granule int64) (from *Disk, own bool, n int64) {
	block := off / granule
	p := x.page(block / mapPageBlocks)
	at := block % mapPageBlocks
	layer := p[at]
	last := min((off+length-1)/granule, x.blocks-1) - block + at
	end := at + 1
	for end <= last && end < mapPageBlocks && p[end] == layer {
		end++
	}
	from, n = x.layers[layer], min(length, (block-at+end)*granule-off)
	if int(layer) < len(x.layers)-1 {
		return from, true, n
	}
	own, n = from.run(off, n)
	return from, own, n
}
