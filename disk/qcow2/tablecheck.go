package qcow2

import (
	"context"
	"encoding/binary"
	"math/bits"
)

// tableCheck checks L2 tables. Several of them run at once.
type tableCheck struct {
	*validator
	buf    []byte // of one cluster
	table  []byte // the part of it that is checked
	first  int64  // the guest cluster of its first entry
	data   claims
	packed claims
	starts claims  // of places in which compressed data begins that ends elsewhere
	small  []int64 // offsets of compressed data that ends in its place
	runs   runList

	plainSize, compressedSize int64 // guest bytes
}

// claims are the clusters of one word of a set that the table's entries take. They go into the set
// together.
type claims struct {
	word int64 // of the set
	mask uint64
}

// run checks one table after the other, until none are left or one is bad.
func (c *tableCheck) run(ctx context.Context) error {
	for !c.failed.Load() {
		i := c.next.Add(1) - 1
		if i >= int64(len(c.im.l1)) {
			break
		}
		if err := ctx.Err(); err != nil {
			c.failed.Store(true)
			return err
		}
		c.expect(i + tablesAhead)
		if c.im.l1[i]&offsetMask == 0 {
			continue
		}
		err := c.load(ctx, i)
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

// load reads the L2 table of an L1 entry.
func (c *tableCheck) load(ctx context.Context, entry int64) error {
	if c.buf == nil {
		c.buf = make([]byte, c.clusterSize())
	}
	c.begin(entry, c.buf)
	return c.im.loadTable(ctx, c.buf, c.im.l1[entry]&offsetMask)
}

// begin prepares for the check of the L2 table of an L1 entry. buf holds the table.
func (c *tableCheck) begin(entry int64, buf []byte) {
	c.first = entry * c.l2Entries()
	clusters := (c.size + c.clusterSize() - 1) >> c.clusterBits
	c.table = buf[:min(c.l2Entries(), clusters-c.first)*c.entrySize()]
}

func (c *tableCheck) check() error {
	step, kind := c.entrySize(), noKind
	for at := int64(0); at < int64(len(c.table)); {
		e, sub := c.entryAt(at)
		if k := entryKind(e); k != kind && !c.extended() {
			kind = k
			c.runs.begin(c.first+at/step, kind)
		}
		var err error
		switch n := int64(1); {
		case e|sub == 0:
			at += c.nothing(at)
		case e&entryCompressed != 0:
			at, err = c.compressed(at)
		default:
			if kind == KindData {
				n = c.neighbours(at, e)
			}
			err = c.plain(c.guestOf(at), e, sub, n)
			at += n * step
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
	c.validator.starts.add(c.starts)
	c.starts.mask = 0
	return nil
}

// entryAt returns the two words of the entry at byte at of the table. The second is zero if entries
// have one word.
func (c *tableCheck) entryAt(at int64) (e, sub uint64) {
	e = binary.BigEndian.Uint64(c.table[at:])
	if c.extended() {
		sub = binary.BigEndian.Uint64(c.table[at+8:])
	}
	return e, sub
}

// guestOf returns the guest offset of the entry at byte at.
func (c *tableCheck) guestOf(at int64) int64 {
	return (c.first + at/
		c.entrySize()) << c.clusterBits
}

// nothing returns how many bytes of empty entries begin at byte at, where there is one. There may
// be more.
func (c *tableCheck) nothing(at int64) int64 {
	const stride = 8
	rest := c.table[at:]
	for ; len(rest) >= 8*stride; rest = rest[8*stride:] {
		var any uint64
		for i := range stride {
			any |= binary.NativeEndian.Uint64(rest[8*i:])
		}
		if any != 0 {
			break
		}
	}
	return max(c.entrySize(), int64(len(c.table))-at-int64(len(rest)))
}

// neighbours counts the entries from e at byte at on whose clusters follow each other in the file,
// inside the file, and that are otherwise equal. Most entries of an image that was written in one
// go are like that. They need only one check.
func (c *tableCheck) neighbours(at int64, e uint64) (n int64) {
	limit := max(1, (c.im.fileSize-int64(e&offsetMask)+c.clusterSize()-1)>>c.clusterBits)
	rest := c.table[at+8:]
	for n = 1; n < limit && len(rest) >= 8 && binary.BigEndian.Uint64(rest) == e+
		uint64(n)<<c.clusterBits; n++ {
		rest = rest[8:]
	}
	return n
}

// plain checks an entry together with its neighbours, n entries in all.
func (c *tableCheck) plain(guest int64, e, sub uint64, n int64) error {
	host, err := c.checkPlain(guest, e, sub, c.im.fileSize)
	if err != nil || host == 0 {
		return err
	}
	switch {
	case c.extended():
		c.plainSize += c.subclusterBytes(uint32(sub), c.size-guest)
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

// checkPlain checks an L2 entry that is not compressed, and returns where its cluster lies in the
// file, or 0 if it has none.
func (h *header) checkPlain(guest int64, e, sub uint64, fileSize int64) (host int64, err error) {
	if e&l2Reserved != 0 || e&entryZero != 0 && (h.version == 2 || h.extended()) {
		return 0, bad("the L2 entry of guest offset %d has reserved bits set (%#x)", guest, e)
	}
	host = int64(e & offsetMask)
	switch alloc, zero := uint32(sub), uint32(sub>>32); {
	case alloc&zero != 0:
		return 0, bad("subclusters of guest offset %d are both allocated and zero", guest)
	case alloc != 0 && host == 0:
		return 0, bad("subclusters of guest offset %d are allocated nowhere", guest)
	case host&(h.clusterSize()-1) != 0:
		return 0, bad("the cluster of guest offset %d lies at %#x, which is not aligned", guest,
			host)
	case host >= fileSize:
		return 0, bad("the cluster of guest offset %d lies at %#x, past the end of the file",
			guest, host)
	}
	return host, nil
}

// subclusterBytes returns how many of a cluster's first rest bytes are in subclusters with a bit in
// alloc.
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

// takeData puts the claims of data into the set. Both takeData and takePacked do that before they
// look at the other set. So if two goroutines claim the same cluster, one of them sees the other.
func (c *tableCheck) takeData() error {
	word, mask := c.data.word, c.data.mask
	c.data.mask = 0
	if n := c.metadata.word(word) & mask; n != 0 {
		host := c.host(word, n)
		return bad("the cluster of guest offset %d lies at %#x, in the image's metadata",
			c.guest(host), host)
	}
	if n := c.validator.data.add(word, mask); n != 0 {
		return badTwice(c.host(word, n))
	}
	if n := c.validator.packed.word(word) & mask; n != 0 {
		host := c.host(word, n)
		return unsupported(actionConvert, "the cluster of guest offset %d lies at %#x, among "+
			"compressed data", c.guest(host), host)
	}
	return nil
}

// compressed checks the run of entries for compressed data from byte at on. It returns where the
// first other entry is. Images have hundreds of thousands of these entries, so the usual case is
// handled here and everything else elsewhere.
func (c *tableCheck) compressed(at int64) (next int64, err error) {
	var (
		step, shift, word, mask = c.entrySize(), c.clusterBits, c.packed.word, c.packed.mask
		lengthShift             = c.lengthShift()
		size                    = c.im.fileSize
		sectorsEnd              = (size + sectorSize - 1) &^ (sectorSize - 1)
		place                   = c.validator.starts.shift
		begin                   = c.starts
	)
	next = at
	before := len(c.small)
	for table := c.table[at:]; int64(len(table)) >= step; table, next = table[step:], next+step {
		e := binary.BigEndian.Uint64(table)
		if e&entryCompressed == 0 {
			break
		}
		off, length := splitEntry(e, lengthShift)
		if e&entryCopied != 0 || off >= size || length > sectorsEnd-off || step > 8 &&
			binary.BigEndian.Uint64(table[8:]) != 0 {
			return next, c.badCompressed(next)
		}
		if n := off >> place; n == (off+length-1)>>place {
			c.small = append(c.small, off)
		} else {
			if n>>6 != begin.word {
				c.validator.starts.add(begin)
				begin = claims{word: n >> 6}
			}
			bit := uint64(1) << (n & 63)
			if begin.mask&bit != 0 {
				c.validator.starts.repeat(begin.word, bit)
			}
			begin.mask |= bit
		}
		first, last := off>>shift, (min(off+length, size)-1)>>shift
		if first>>6 == word && last>>6 == word {
			mask |= ^uint64(0) << (first & 63) & (^uint64(0) >> (63 - last&63))
			continue
		}
		c.packed.word, c.packed.mask = word, mask
		if err := c.pack(first, last); err != nil {
			return next, err
		}
		word, mask = c.packed.word, c.packed.mask
	}
	c.packed.word, c.packed.mask = word, mask
	c.starts = begin
	if c.validator.small.Add(int64(len(c.small)-before)) > maxSmall {
		return next, tooManySmall()
	}
	c.compressedSize += min((next-at)/step<<shift, c.size-c.guestOf(at))
	return next, nil
}

// pack claims the clusters first to last, in one or more words.
func (c *tableCheck) pack(first, last int64) error {
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

// badCompressed returns what is wrong with the entry at byte at.
func (c *tableCheck) badCompressed(at int64) error {
	e, sub := c.entryAt(at)
	off, length := c.compressedRange(e)
	switch guest := c.guestOf(at); {
	case sub != 0:
		return bad("the compressed cluster of guest offset %d has subclusters", guest)
	case e&entryCopied != 0:
		return unsupported(actionConvert, "the compressed cluster of guest offset %d is marked as "+
			"not shared", guest)
	default:
		return bad("the compressed data of guest offset %d, %d bytes at %#x, runs past the end "+
			"of the file", guest, length, off)
	}
}

func (c *tableCheck) takePacked() error {
	word, mask := c.packed.word, c.packed.mask
	c.packed.mask = 0
	if n := c.metadata.word(word) & mask; n != 0 {
		return bad("the compressed data of guest offset %d lies in the image's metadata",
			c.guest(c.host(word, n)))
	}
	c.validator.packed.add(word, mask)
	if n := c.validator.data.word(word) & mask; n != 0 {
		return unsupported(actionConvert, "the compressed data of guest offset %d overlaps "+
			"another cluster", c.guest(c.host(word, n)))
	}
	return nil
}

// host returns the offset of the first cluster of a word with a bit in mask.
func (c *tableCheck) host(word int64, mask uint64) int64 {
	return (word<<6 + int64(bits.TrailingZeros64(mask))) << c.clusterBits
}

// guest returns the guest offset of the table's first entry that takes a part of the cluster at
// host.
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
	// This is not reached, because an entry of this table took the cluster. The offset of the table
	// is the closest answer.
	return c.first << c.clusterBits
}
