package qcow2

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
)

// AppendOptions are the options of NewAppender.
type AppendOptions struct {
	// ClusterSize is a power of two from 4 KiB to 64 KiB. 0: 4 KiB, so that small changes far apart
	// make a small file. Bytes.
	ClusterSize int64
	// Backing is the name of the backing file, a qcow2 image in the same directory. "": there is
	// none.
	Backing string
}

// Appender writes an image of a disk that is being made: its clusters come in any order, and are
// stored as they are. (Write stores a disk that exists.) The tables are behind the clusters:
//
//	header | clusters | L2 tables | L1 table | refcount blocks | refcount table
//
// One goroutine uses it. The header is written last. Until then, there is no image.
type Appender struct {
	dst     io.WriterAt
	bits    uint
	backing string

	runs  []appended
	start int64  // where wait goes in the file
	wait  []byte // clusters that are not written yet
	err   error  // of a write; after it, nothing is written
}

// appended is a run of clusters that were written one after the other.
type appended struct {
	guest, n int64 // clusters
	host     int64 // offset of the first one in the file, bytes; 0: the clusters are zeros
}

// appendWindow is how much is written at once. Bytes.
const appendWindow = 1 << 20

// NewAppender begins an image in the empty dst.
func NewAppender(dst io.WriterAt, opt AppendOptions) (*Appender, error) {
	opt.ClusterSize = cmp.Or(opt.ClusterSize, 4<<10)
	size := uint64(opt.ClusterSize)
	if size < 4<<10 || size > 64<<10 || size&(size-1) != 0 {
		return nil, fmt.Errorf("clusters of %d bytes: a power of two from 4 KiB to 64 KiB works",
			opt.ClusterSize)
	}
	if len(opt.Backing) > maxNameLen {
		return nil, fmt.Errorf("the name of the backing file has %d bytes, more than %d",
			len(opt.Backing), maxNameLen)
	}
	return &Appender{dst: dst, bits: uint(bits.TrailingZeros64(size)), backing: opt.Backing,
		start: opt.ClusterSize, wait: make([]byte, 0, appendWindow)}, nil
}

func (a *Appender) clusterSize() int64 { return 1 << a.bits }

// WriteAt stores whole clusters of the disk. Each cluster must come only once: Finish refuses
// duplicates. A cluster of zeros takes no room, and hides the backing file's content.
func (a *Appender) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || (off|int64(len(p)))&(a.clusterSize()-1) != 0 {
		return 0, fmt.Errorf("%d bytes at %d are not whole clusters", len(p), off)
	}
	for done := 0; done < len(p); {
		cluster := p[done:][:a.clusterSize()]
		guest := (off + int64(done)) >> a.bits
		done += len(cluster)
		if isZero(cluster) {
			a.note(appended{guest: guest, n: 1})
			continue
		}
		a.note(appended{guest: guest, n: 1, host: a.end()})
		if a.append(cluster); a.err != nil {
			return 0, a.err
		}
	}
	return len(p), nil
}

// end is where the next cluster goes in the file.
func (a *Appender) end() int64 { return a.start + int64(len(a.wait)) }

// note remembers where clusters are stored.
func (a *Appender) note(r appended) {
	if n := len(a.runs); n > 0 {
		last := &a.runs[n-1]
		follows := last.host == 0 && r.host == 0 ||
			last.host != 0 && r.host == last.host+last.n<<a.bits
		if last.guest+last.n == r.guest && follows {
			last.n += r.n
			return
		}
	}
	a.runs = append(a.runs, r)
}

// append writes p at the end. An error goes to a.err.
func (a *Appender) append(p []byte) {
	for len(p) > 0 && a.err == nil {
		n := min(len(p), appendWindow-len(a.wait))
		a.wait = append(a.wait, p[:n]...)
		if p = p[n:]; len(a.wait) == appendWindow {
			a.flush()
		}
	}
}

func (a *Appender) flush() {
	if a.err == nil {
		a.err = writeFull(a.dst, a.wait, a.start)
	}
	a.start += int64(len(a.wait))
	a.wait = a.wait[:0]
}

// errTwice is a cluster that came more than once.
var errTwice = errors.New("a cluster of the disk was written twice")

// Finish writes the tables of a disk of that many bytes, and returns the size of the file.
func (a *Appender) Finish(size int64) (int64, error) {
	p := placement{clusterBits: a.bits}
	if limit := maxL1Bytes / 8 * p.tableReach(); size <= 0 || size%sectorSize != 0 || size > limit {
		return 0, fmt.Errorf("a disk of %d bytes cannot be stored: its size has to be a positive "+
			"multiple of %d, and at most %d", size, sectorSize, limit)
	}
	slices.SortFunc(a.runs, func(r, s appended) int { return cmp.Compare(r.guest, s.guest) })
	for i, r := range a.runs {
		if i > 0 && a.runs[i-1].guest+a.runs[i-1].n > r.guest {
			return 0, errTwice
		}
		if (r.guest+r.n-1)<<a.bits >= size {
			return 0, fmt.Errorf("a cluster was written past the size of %d bytes", size)
		}
	}
	p.l1 = make([]uint64, (size-1)/p.tableReach()+1)
	a.appendTables(&p)
	p.l1Table = a.end()
	a.appendNumbers(p.l1)
	a.appendRefcounts(&p)
	end := a.end()
	a.flush()
	head := make([]byte, a.clusterSize())
	p.putHeader(head, size, CompressionNone)
	putBacking(head, Backing{Name: a.backing, Format: "qcow2"})
	if a.err == nil {
		a.err = writeFull(a.dst, head, 0)
	}
	return end, a.err
}

// appendTables writes the L2 tables, and enters their places in the L1 table.
func (a *Appender) appendTables(p *placement) {
	perTable := a.clusterSize() / 8
	table, index := make([]byte, a.clusterSize()), int64(-1)
	flush := func() {
		if index >= 0 {
			p.l1[index] = uint64(a.end()) | entryCopied
			a.append(table)
			clear(table)
		}
	}
	for _, r := range a.runs {
		for i := range r.n {
			guest := r.guest + i
			if guest/perTable != index {
				flush()
				index = guest / perTable
			}
			entry := uint64(entryZero)
			if r.host != 0 {
				entry = uint64(r.host+i<<a.bits) | entryCopied
			}
			binary.BigEndian.PutUint64(table[guest%perTable*8:], entry)
		}
	}
	flush()
}

// appendNumbers writes a table, padded with zeros to whole clusters.
func (a *Appender) appendNumbers(table []uint64) {
	p := make([]byte, (int64(len(table))*8+a.clusterSize()-1)&^(a.clusterSize()-1))
	for i, n := range table {
		binary.BigEndian.PutUint64(p[8*i:], n)
	}
	a.append(p)
}

// appendRefcounts writes refcounts of 1 for each cluster of the file.
func (a *Appender) appendRefcounts(p *placement) {
	clusters, perBlock := a.end()>>a.bits, a.clusterSize()/2
	blocks, tables := int64(0), int64(0)
	for clusters+blocks+tables > blocks*perBlock {
		blocks++
		tables = (blocks*8 + a.clusterSize() - 1) >> a.bits
	}
	used := clusters + blocks + tables
	table := make([]uint64, blocks)
	block := make([]byte, a.clusterSize())
	for i := range blocks {
		table[i] = uint64(a.end())
		clear(block)
		for j := range min(perBlock, used-i*perBlock) {
			binary.BigEndian.PutUint16(block[2*j:], 1)
		}
		a.append(block)
	}
	p.refTable = a.end()
	p.refTableEnd = p.refTable + tables<<a.bits
	a.appendNumbers(table)
}
