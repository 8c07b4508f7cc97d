package qcow2

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// tableCheck looks at L2 tables, beside others that do.
type tableCheck struct {
	*validator
	table   []byte
	first   int64 // the guest cluster of its first entry
	data    claims
	packed  claims
	scratch []uint64
	starts  [][]uint64 // of compressed data: a sorted list for each table that has any

	plainSize, compressedSize int64 // guest bytes
}

// claims are neighbouring clusters of the file that entries of the table take, which go into a set together.
type claims struct {
	word int64 // of the set
	mask uint64
}

func (c *claims) has(n int64) bool { return c.word == n>>6 && c.mask>>(n&63)&1 != 0 }

// run takes one table after the other, until there are none left or one is bad.
func (c *tableCheck) run() error {
	buf := make([]byte, c.clusterSize())
	for !c.failed.Load() {
		i := c.next.Add(1) - 1
		if i >= int64(len(c.im.l1)) {
			break
		}
		off := int64(c.im.l1[i] & offsetMask)
		if off == 0 {
			continue
		}
		c.first = i * c.l2Entries()
		c.table = buf[:min(c.l2Entries(), (c.size+c.clusterSize()-1)>>c.clusterBits-c.first)*c.entrySize()] // the rest is never read
		err := c.im.loadTable(buf, uint64(off))
		if err == nil {
			err = c.check()
		}
		if err != nil {
			c.failed.Store(true)
			return err
		}
	}
	return nil
}

func (c *tableCheck) check() error {
	c.scratch = c.scratch[:0]
	step := int(c.entrySize())
	for at := 0; at < len(c.table); at += step {
		e := binary.BigEndian.Uint64(c.table[at:])
		var sub uint64
		if step == 16 {
			sub = binary.BigEndian.Uint64(c.table[at+8:])
		}
		if e|sub == 0 {
			continue
		}
		guest := (c.first + int64(at/step)) << c.clusterBits
		var err error
		if e&entryCompressed != 0 {
			err = c.compressed(guest, e, sub)
		} else {
			err = c.plain(guest, e, sub)
		}
		if err != nil {
			return err
		}
	}
	if err := c.takeData(); err != nil {
		return err
	}
	if err := c.takePacked(); err != nil {
		return err
	}
	if len(c.scratch) > 0 {
		slices.Sort(c.scratch)
		c.starts = append(c.starts, slices.Clone(c.scratch))
	}
	return nil
}

func (c *tableCheck) plain(guest int64, e, sub uint64) error {
	if e&l2Reserved != 0 || e&entryZero != 0 && (c.version == 2 || c.extended()) {
		return bad("the L2 entry of guest offset %d has reserved bits set (%#x)", guest, e)
	}
	host := int64(e & offsetMask)
	alloc, zero := uint32(sub), uint32(sub>>32)
	switch {
	case alloc&zero != 0:
		return bad("subclusters of guest offset %d are both allocated and zero", guest)
	case alloc != 0 && host == 0:
		return bad("subclusters of guest offset %d are allocated nowhere", guest)
	case host == 0:
		return nil
	case host&(c.clusterSize()-1) != 0:
		return bad("the cluster of guest offset %d lies at %#x, which is not aligned", guest, host)
	case host >= c.im.fileSize:
		return bad("the cluster of guest offset %d lies at %#x, past the end of the file", guest, host)
	}
	switch {
	case c.extended():
		c.plainSize += c.subclusterBytes(alloc, c.size-guest)
	case e&entryZero == 0:
		c.plainSize += min(c.clusterSize(), c.size-guest)
	}
	n := host >> c.clusterBits
	if c.data.has(n) {
		return badTwice(host)
	}
	if n>>6 != c.data.word {
		if err := c.takeData(); err != nil {
			return err
		}
		c.data.word = n >> 6
	}
	c.data.mask |= 1 << (n & 63)
	return nil
}

// subclusterBytes is how much of a cluster's first rest bytes the subclusters with a bit in alloc have.
func (h *header) subclusterBytes(alloc uint32, rest int64) (n int64) {
	sub := h.clusterSize() / 32
	if rest >= h.clusterSize() {
		return sub * int64(bits.OnesCount32(alloc))
	}
	for i := range int64(32) {
		if alloc>>i&1 != 0 {
			n += max(min(sub, rest-i*sub), 0)
		}
	}
	return n
}

func badTwice(host int64) error {
	return bad("the cluster at %#x is used by more than one guest cluster", host)
}

// takeData puts what data claims into the set. That is done before the other set is looked at, here and in takePacked, so that
// of two goroutines that claim the same cluster one sees the other.
func (c *tableCheck) takeData() error {
	word, mask := c.data.word, c.data.mask
	c.data.mask = 0
	if n := c.metadata.word(word) & mask; n != 0 {
		host := c.host(word, n)
		return bad("the cluster of guest offset %d lies at %#x, in the image's metadata", c.guest(host), host)
	}
	if n := c.validator.data.add(word, mask); n != 0 {
		return badTwice(c.host(word, n))
	}
	if n := c.validator.packed.word(word) & mask; n != 0 {
		host := c.host(word, n)
		return bad("the cluster of guest offset %d lies at %#x, among compressed data", c.guest(host), host)
	}
	return nil
}

func (c *tableCheck) compressed(guest int64, e, sub uint64) error {
	if sub != 0 {
		return bad("the compressed cluster of guest offset %d has subclusters", guest)
	}
	if e&entryCopied != 0 {
		return bad("the compressed cluster of guest offset %d is marked as not shared", guest)
	}
	off, length := c.compressedRange(e)
	if off >= c.im.fileSize || length > (c.im.fileSize+511)&^511-off {
		return bad("the compressed data of guest offset %d, %d bytes at %#x, runs past the end of the file", guest, length, off)
	}
	c.compressedSize += min(c.clusterSize(), c.size-guest)
	c.scratch = append(c.scratch, uint64(off))
	end := min(off+length, c.im.fileSize)
	for n := off >> c.clusterBits; n<<c.clusterBits < end; n++ {
		if n>>6 != c.packed.word {
			if err := c.takePacked(); err != nil {
				return err
			}
			c.packed.word = n >> 6
		}
		c.packed.mask |= 1 << (n & 63)
	}
	return nil
}

func (c *tableCheck) takePacked() error {
	word, mask := c.packed.word, c.packed.mask
	c.packed.mask = 0
	if n := c.metadata.word(word) & mask; n != 0 {
		return bad("the compressed data of guest offset %d lies in the image's metadata", c.guest(c.host(word, n)))
	}
	c.validator.packed.add(word, mask)
	if n := c.validator.data.word(word) & mask; n != 0 {
		return bad("the compressed data of guest offset %d overlaps another cluster", c.guest(c.host(word, n)))
	}
	return nil
}

// host is the offset of the first cluster of a word that has a bit in mask.
func (c *tableCheck) host(word int64, mask uint64) int64 {
	return (word<<6 + int64(bits.TrailingZeros64(mask))) << c.clusterBits
}

// guest is the offset of the first entry of the table that takes the cluster at host, or a part of it.
func (c *tableCheck) guest(host int64) int64 {
	for at := int64(0); at < int64(len(c.table)); at += c.entrySize() {
		e := binary.BigEndian.Uint64(c.table[at:])
		off, length := int64(e&offsetMask), int64(1)
		if e&entryCompressed != 0 {
			off, length = c.compressedRange(e)
		}
		if e != 0 && off < host+c.clusterSize() && off+length > host {
			return (c.first + at/c.entrySize()) << c.clusterBits
		}
	}
	// Not reached, as an entry of this table took the cluster; the table itself is then as near as it gets.
	return c.first << c.clusterBits
}
