package qcow2

import "encoding/binary"

// placement decides where everything lies in the file:
//
//	header | refcount table | L1 table | L2 tables | clusters | refcount blocks
//
// The places of the tables are known before the first cluster. There is an L2 table for each part
// of the disk that is not all zeros. The refcount blocks are at the end, because their number is
// known last, and no reader needs them.
//
// Compressed clusters are packed one behind the other. A plain cluster takes the next whole cluster
// of the file. A compressed one that no longer fits before it goes behind it.
type placement struct {
	clusterBits uint
	out         output

	refTable, refTableEnd int64
	l1Table, l1TableEnd   int64 // both are at the ends of clusters
	l1                    []uint64

	l2      []byte   // the table that is being filled
	l2Index int64    // of its L1 entry; -1: none
	next    int64    // where the next compressed cluster goes if it fits before end
	end     int64    // end of the clusters that are taken
	refs    []uint16 // of each cluster of the file
}

func (w *placement) clusterSize() int64 { return 1 << w.clusterBits }

// roundUp returns the end of the cluster that has the byte before off.
func (w *placement) roundUp(off int64) int64 {
	return (off + w.clusterSize() - 1) &^ (w.clusterSize() - 1)
}

// tableReach is how many bytes of the disk one L2 table maps.
func (w *placement) tableReach() int64 { return 1 << (2*w.clusterBits - 3) }

// refBlockBits is the logarithm of the number of clusters that a refcount block counts, with 16
// bits each.
func (w *placement) refBlockBits() uint { return w.clusterBits - 1 }

// layOut places the tables.
func (w *placement) layOut(begins []uint32) {
	tables := int64(0)
	for _, begin := range begins {
		if begin != 0 {
			tables++
		}
	}
	l1Length := w.roundUp(int64(len(begins)) * 8)
	// A cluster of the disk takes at most one of the file. Twice the refcount blocks for these
	// leave room for the refcounts' own clusters.
	most := (w.clusterSize() + l1Length + tables*(w.clusterSize()+w.tableReach())) >> w.clusterBits
	blocks := 2*(most>>w.refBlockBits()) + 2
	w.refTable = w.clusterSize()
	w.refTableEnd = w.refTable + w.roundUp(blocks*8)
	w.l1Table, w.l1TableEnd = w.refTableEnd, w.refTableEnd+l1Length
	w.end = w.l1TableEnd
	w.l1 = make([]uint64, len(begins))
	for i, begin := range begins {
		if begin != 0 {
			w.l1[i] = uint64(w.end) | entryCopied
			w.end += w.clusterSize()
		}
	}
	w.next = w.end
	w.out.start = w.end
	w.l2, w.l2Index = make([]byte, w.clusterSize()), -1
	w.take(0, w.end)
}

// take counts a use of each cluster that has bytes from off to end.
func (w *placement) take(off, end int64) {
	last := (end - 1) >> w.clusterBits
	for int64(len(w.refs)) <= last {
		w.refs = append(w.refs, 0)
	}
	for i := off >> w.clusterBits; i <= last; i++ {
		w.refs[i]++ // no overflow: a cluster has room for 32,768 compressed ones of 2 bytes
	}
}

// storePlain stores a cluster of the disk as it is. Clusters come in the order of the disk.
func (w *placement) storePlain(guest int64, content []byte) error {
	off := w.end
	w.end += w.clusterSize()
	w.take(off, w.end)
	if err := w.enter(guest, uint64(off)|entryCopied); err != nil {
		return err
	}
	return w.out.write(content, off)
}

// storePacked stores a compressed cluster.
func (w *placement) storePacked(guest int64, packed []byte) error {
	n := int64(len(packed))
	if room := w.roundUp(w.next) - w.next; n > room && w.next+room != w.end {
		w.next = w.end
	}
	off := w.next
	w.next += n
	w.end = max(w.end, w.roundUp(w.next))
	w.take(off, w.next)
	sectors := (off&(sectorSize-1)+n+sectorSize-1)>>sectorBits - 1
	entry := entryCompressed | uint64(sectors)<<lengthShift(w.clusterBits) | uint64(off)
	if err := w.enter(guest, entry); err != nil {
		return err
	}
	return w.out.write(packed, off)
}

// enter stores the entry of a cluster of the disk in its L2 table.
func (w *placement) enter(guest int64, entry uint64) error {
	perTable := w.clusterSize() / 8
	if index := guest / perTable; index != w.l2Index {
		if err := w.flushTable(); err != nil {
			return err
		}
		w.l2Index = index
	}
	binary.BigEndian.PutUint64(w.l2[guest%perTable*8:], entry)
	return nil
}

// flushTable writes the L2 table that is being filled.
func (w *placement) flushTable() error {
	if w.l2Index < 0 {
		return nil
	}
	err := writeFull(w.out.dst, w.l2, int64(w.l1[w.l2Index]&offsetMask))
	clear(w.l2)
	return err
}

// finish writes what is left, the header last, and returns the length of the file.
func (w *placement) finish(size int64, compression Compression, backing Backing) (int64, error) {
	if err := w.flushTable(); err != nil {
		return 0, err
	}
	if err := w.out.finish(w.end); err != nil {
		return 0, err
	}
	blocksAt, clusters := w.end, w.end>>w.clusterBits
	blocks := int64(0)
	for clusters+blocks > blocks<<w.refBlockBits() {
		blocks++
	}
	w.end += blocks << w.clusterBits
	w.take(blocksAt, w.end)
	block := make([]byte, w.clusterSize())
	for i := range blocks {
		clear(block)
		first := i << w.refBlockBits()
		for j, n := range w.refs[first:min(first+1<<w.refBlockBits(), int64(len(w.refs)))] {
			binary.BigEndian.PutUint16(block[2*j:], n)
		}
		if err := writeFull(w.out.dst, block, blocksAt+i<<w.clusterBits); err != nil {
			return 0, err
		}
	}
	head := make([]byte, w.l1TableEnd)
	for i := range blocks {
		binary.BigEndian.PutUint64(head[w.refTable+8*i:], uint64(blocksAt+i<<w.clusterBits))
	}
	for i, e := range w.l1 {
		binary.BigEndian.PutUint64(head[w.l1Table+8*int64(i):], e)
	}
	if err := writeFull(w.out.dst, head[w.clusterSize():], w.clusterSize()); err != nil {
		return 0, err
	}
	w.putHeader(head, size, compression)
	putBacking(head[:w.clusterSize()], backing)
	return w.end, writeFull(w.out.dst, head[:w.clusterSize()], 0)
}

// putHeader fills in the header. The package comment shows the layout.
func (w *placement) putHeader(p []byte, size int64, compression Compression) {
	be := binary.BigEndian
	be.PutUint32(p[0:], magic)
	be.PutUint32(p[4:], 3)
	be.PutUint32(p[20:], uint32(w.clusterBits))
	be.PutUint64(p[24:], uint64(size))
	be.PutUint32(p[36:], uint32(len(w.l1)))
	be.PutUint64(p[40:], uint64(w.l1Table))
	be.PutUint64(p[48:], uint64(w.refTable))
	be.PutUint32(p[56:], uint32((w.refTableEnd-w.refTable)>>w.clusterBits))
	be.PutUint32(p[96:], refcountOrder)
	be.PutUint32(p[100:], headerLenV3)
	if compression != CompressionZstd {
		return
	}
	be.PutUint64(p[72:], incompatCompression)
	be.PutUint32(p[100:], headerLenV3+8) // the length is a multiple of 8
	p[headerLenV3] = compressionZstd
	// A QEMU without zstd prints this name in its message.
	const bit, name = 3, "compression type"
	names := p[headerLenV3+8:]
	be.PutUint32(names[0:], extFeatureNames)
	be.PutUint32(names[4:], 48) // one feature: type, bit, name
	names[8], names[9] = 0, bit // an incompatible one
	copy(names[10:], name)
}

// putBacking adds the backing file, if there is one, to a header: its format as the last extension,
// and its name behind that.
func putBacking(p []byte, backing Backing) {
	if backing.Name == "" {
		return
	}
	be := binary.BigEndian
	at := be.Uint32(p[100:])
	for be.Uint32(p[at:]) != extEnd {
		at += 8 + (be.Uint32(p[at+4:])+7)&^7
	}
	be.PutUint32(p[at:], extBackingFormat)
	be.PutUint32(p[at+4:], uint32(len(backing.Format)))
	copy(p[at+8:], backing.Format)
	at += 8 + uint32(len(backing.Format)+7)&^7 + 8 // 8 for the end of the extensions
	be.PutUint64(p[8:], uint64(at))
	be.PutUint32(p[16:], uint32(len(backing.Name)))
	copy(p[at:], backing.Name)
}
