package qcow2

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

const maxOutOfOrder = 32 // twice as many as threads compress for qemu-img at most

// tableCheck looks at L2 tables, beside others that do.
type tableCheck struct {
	*validator
	table   []byte
	first   int64 // the guest cluster of its first entry
	data    claims
	packed  claims
	scratch []uint64
	starts  [][]uint64 // of compressed data: a sorted list for each table that has any
	runs    runList

	plainSize, compressedSize int64 // guest bytes
}

// claims are neighbouring clusters of the file that entries of the table take, which go into a set together.
type claims struct {
	word int64 // of the set
	mask uint64
}

// run takes one table after the other, until there are none left or one is bad.
func (c *tableCheck) run() error {
	buf := make([]byte, c.clusterSize())
	for !c.failed.Load() {
		i := c.next.Add(1) - 1
		if i >= int64(len(c.im.l1)) {
			break
		}
		c.expect(i + tablesAhead)
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
	step, kind, n := int(c.entrySize()), noKind, int64(1)
	for at, cluster := 0, c.first; at < len(c.table); at, cluster = at+int(n)*step, cluster+n {
		e := binary.BigEndian.Uint64(c.table[at:])
		var sub uint64
		if step == 16 {
			sub = binary.BigEndian.Uint64(c.table[at+8:])
		} else if k := entryKind(e); k != kind {
			kind = k
			c.runs.begin(cluster, kind)
		}
		n = 1
		if e|sub == 0 {
			continue
		}
		guest := cluster << c.clusterBits
		var err error
		switch {
		case e&entryCompressed != 0:
			err = c.compressed(guest, e, sub)
		case kind == KindData:
			n = c.neighbours(at, e)
			fallthrough
		default:
			err = c.plain(guest, e, sub, n)
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

// neighbours counts the entries from the one at byte at on, which is e, that differ only in that each cluster lies behind the one before,
// inside the file: as most of an image that was written in one go do. They need be looked at once.
func (c *tableCheck) neighbours(at int, e uint64) (n int64) {
	limit := max(1, (c.im.fileSize-int64(e&offsetMask)+c.clusterSize()-1)>>c.clusterBits)
	rest := c.table[at+8:]
	for n = 1; n < limit && len(rest) >= 8 && binary.BigEndian.Uint64(rest) == e+uint64(n)<<c.clusterBits; n++ {
		rest = rest[8:]
	}
	return n
}

// plain looks at an entry and the neighbours that go with it, n in all.
func (c *tableCheck) plain(guest int64, e, sub uint64, n int64) error {
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
		c.plainSize += min(n<<c.clusterBits, c.size-guest)
	}
	first := host >> c.clusterBits
	for last := first + n - 1; first <= last; {
		mask, next := wordOf(first, last)
		if first>>6 != c.data.word {
			if err := c.takeData(); err != nil {
				return err
			}
			c.data.word = first >> 6
		}
		if both := c.data.mask & mask; both != 0 {
			return badTwice(c.host(c.data.word, both))
		}
		c.data.mask |= mask
		first = next
	}
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
	c.begins(uint64(off))
	first, last := off>>c.clusterBits, (min(off+length, c.im.fileSize)-1)>>c.clusterBits
	for first <= last {
		mask, next := wordOf(first, last)
		if first>>6 != c.packed.word {
			if err := c.takePacked(); err != nil {
				return err
			}
			c.packed.word = first >> 6
		}
		c.packed.mask |= mask
		first = next
	}
	return nil
}

// begins notes where compressed data begins, and keeps the list in order as far as that is cheap: with several threads, qemu-img writes
// neighbours in another order, but near to each other.
func (c *tableCheck) begins(off uint64) {
	c.scratch = append(c.scratch, off)
	at := len(c.scratch) - 1
	for first := max(0, at-maxOutOfOrder); at > first && c.scratch[at-1] > off; at-- {
		c.scratch[at] = c.scratch[at-1]
	}
	c.scratch[at] = off
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
