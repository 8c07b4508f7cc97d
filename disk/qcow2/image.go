package qcow2

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Options bound what an image may claim. The zero value works.
type Options struct {
	MaxVirtualSize int64 // bytes; 0: 64 TiB
	// WillRead announces a range of the file, at least one byte, that will soon be read. So storage
	// can fetch several ranges at once. Several goroutines call it, and it should not wait. It may
	// be nil.
	WillRead func(off, length int64)
	// Parallel is how many reads are worth having under way at once. If the file is far away, each
	// read takes long, however short it is. 0 or 1 means that the file is near.
	Parallel int
	// CacheBytes bounds the memory for tables, and the memory for decoded clusters. 0: 16 MiB and 8
	// MiB.
	CacheBytes int64
}

// Reader is the file of an image, or the disk in its backing file. Any number of goroutines may
// call it.
type Reader interface {
	// ReadAt fills p, or returns an error and how many bytes it has read, as an io.ReaderAt does.
	// It waits for far content until ctx ends. Its error is then that of ctx.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
}

// Info describes an image.
type Info struct {
	Version        int
	ClusterSize    int64  // bytes
	VirtualSize    int64  // bytes
	PlainSize      int64  // guest bytes that this file stores as they are
	CompressedSize int64  // guest bytes that it stores compressed
	Compression    string // "zlib" or "zstd"; "" if nothing is compressed
	BackingFile    string // a claim of the image; the caller resolves it
	BackingFormat  string
	ExtendedL2     bool
}

// Image is an open, validated image. Any number of goroutines may call its methods, except
// SetBacking.
type Image struct {
	r        Reader
	fileSize int64
	hdr      *header
	l1       []uint64
	info     Info
	tables   cache // L2 tables, by their index in the L1 table
	// the last few tables that an extent was looked up in, and that no read has used
	passing  cache
	decoded  cache // decoded clusters, by their guest cluster
	codec    codec
	willRead func(off, length int64) // of Options if the file is far away, otherwise nil

	backing     Reader
	backingSize int64
}

// Open reads and validates an image of fileSize bytes: the header, its extensions and every table.
// It also checks that no two entries claim the same place. A fault of the image is a *FormatError.
// Other errors are those of r. Reads after Open do not use ctx.
func Open(ctx context.Context, r Reader, fileSize int64, opt Options) (*Image, error) {
	h, err := readHeader(ctx, r, fileSize, opt)
	if err != nil {
		return nil, err
	}
	willRead := opt.WillRead
	if willRead == nil {
		willRead = func(int64, int64) {}
	}
	willRead(h.refTableOffset, h.refTableLen<<h.clusterBits)
	im := &Image{r: r, fileSize: fileSize, hdr: h}
	if opt.Parallel > 1 {
		im.willRead = willRead
	}
	tables, decoded := int64(tableCacheBytes), int64(decodedCacheBytes)
	if opt.CacheBytes > 0 {
		tables, decoded = min(tables, opt.CacheBytes), min(decoded, opt.CacheBytes)
	}
	im.tables.init(h.clusterSize(), tables, im.loadTable)
	im.passing.init(h.clusterSize(), 0, im.loadTable)
	im.decoded.init(h.clusterSize(), decoded, im.loadCluster)
	im.codec.init(h)
	if err := im.readL1(ctx); err != nil {
		return nil, err
	}
	plain, compressed, err := newValidator(im, willRead).run(ctx, opt.Parallel)
	if err != nil {
		return nil, err
	}
	im.info = Info{Version: h.version, ClusterSize: h.clusterSize(), VirtualSize: h.size,
		PlainSize: plain, CompressedSize: compressed, BackingFile: h.backingFile,
		BackingFormat: h.backingFormat, ExtendedL2: h.extended()}
	if compressed > 0 {
		im.info.Compression = im.codec.name()
	}
	return im, nil
}

// readL1 loads the L1 entries that the virtual size needs. Other entries are never used.
func (im *Image) readL1(ctx context.Context) error {
	raw := make([]byte, im.hdr.l1Need()*8)
	if err := readFull(ctx, im.r, raw, im.hdr.l1Offset); err != nil {
		return fmt.Errorf("reading the L1 table: %w", err)
	}
	im.l1 = make([]uint64, len(raw)/8)
	for i := range im.l1 {
		im.l1[i] = binary.BigEndian.Uint64(raw[i*8:])
	}
	return nil
}

// loadTable fills p with the L2 table at off.
func (im *Image) loadTable(ctx context.Context, p []byte, off uint64) error {
	if err := readFull(ctx, im.r, p, int64(off)); err != nil {
		return fmt.Errorf("reading the L2 table at %#x: %w", off, err)
	}
	return nil
}

// Size is the virtual size in bytes.
func (im *Image) Size() int64 { return im.hdr.size }

// Info describes the image.
func (im *Image) Info() Info { return im.info }

// SetBacking sets the backing file. Behind its end, the image reads as zeros. Call SetBacking
// before the image is read.
func (im *Image) SetBacking(r Reader, size int64) { im.backing, im.backingSize = r, size }

// Kind says how an image stores a range of its disk.
type Kind uint8

// The kinds.
const (
	KindUnallocated Kind = iota // the backing file's content, or zeros without one
	KindZero                    // zeros, whatever the backing file has
	KindData                    // stored as it is
	KindCompressed              // stored compressed
)

func (k Kind) String() string {
	switch k {
	case KindUnallocated:
		return "unallocated"
	case KindZero:
		return "zero"
	case KindData:
		return "data"
	case KindCompressed:
		return "compressed"
	}
	return fmt.Sprintf("%d", uint8(k))
}

// piece is a run of guest bytes of one kind. If the kind is KindData, the run is also contiguous in
// the file.
type piece struct {
	kind  Kind
	n     int64
	host  int64  // KindData: the offset in the file
	entry uint64 // KindCompressed: the L2 entry
}

// tableAt returns the L2 table of a guest offset. The caller releases it. limit is length, cut off
// at the end of the table. If there is no table, table.data is nil, and everything there is
// unallocated. keep says that the table will be needed again.
func (im *Image) tableAt(ctx context.Context, off, length int64, keep bool) (table pinned, first,
	limit int64, err error) {
	h := im.hdr
	cluster, perTable := off>>h.clusterBits, h.l2Entries()
	index := cluster / perTable
	limit = min(length, (index+1)*perTable<<h.clusterBits-off)
	if l2 := im.l1[index] & offsetMask; l2 != 0 {
		c := &im.tables
		if !keep && !c.has(index, h.clusterSize()) {
			c = &im.passing
		}
		table, err = c.get(ctx, index, l2, h.clusterSize())
	}
	return table, cluster % perTable, limit, err
}

// locate describes the run at off that one read can cover: at most length bytes, and not past its
// L2 table. keep is as for tableAt.
func (im *Image) locate(ctx context.Context, off, length int64, keep bool) (piece, error) {
	return im.join(ctx, off, length, keep, func(p, q piece) bool {
		return q.kind == p.kind && q.kind != KindCompressed &&
			(q.kind != KindData || q.host == p.host+p.n)
	})
}

// join describes the pieces at off that belong together: at most length bytes, and not past their
// L2 table.
func (im *Image) join(ctx context.Context, off, length int64, keep bool,
	together func(p, q piece) bool) (piece, error) {
	h := im.hdr
	table, first, limit, err := im.tableAt(ctx, off, length, keep)
	if err != nil {
		return piece{}, err
	}
	if table.data == nil {
		return piece{kind: KindUnallocated, n: limit}, nil
	}
	defer table.release()
	var p piece
	for i := first; p.n < limit; i++ {
		within := int64(0)
		if i == first {
			within = off & (h.clusterSize() - 1)
		}
		q := h.entryPiece(table.data, i, within)
		switch {
		case p.n == 0:
			p = q
		case !together(p, q):
			return p.clip(limit), nil
		default:
			p.n += q.n
		}
		if (within+q.n)&(h.clusterSize()-1) != 0 {
			break // the run ends in this cluster, at a subcluster of another kind
		}
	}
	return p.clip(limit), nil
}

// sameKind describes the run of one kind at off, wherever it is stored: at most length bytes, and
// not past its L2 table. It looks only at the kind and does not fill the cache with tables, because
// the whole disk is searched with it before the disk is served.
func (im *Image) sameKind(ctx context.Context, off, length int64) (n int64, kind Kind, err error) {
	h := im.hdr
	if h.extended() {
		p, err := im.join(ctx, off, length, true,
			func(p, q piece) bool { return q.kind == p.kind })
		return p.n, p.kind, err
	}
	table, first, limit, err := im.tableAt(ctx, off, length, false)
	if err != nil || table.data == nil {
		return limit, KindUnallocated, err
	}
	defer table.release()
	within := off & (h.clusterSize() - 1)
	entries := table.data[first*8 : first*8+(within+limit+h.clusterSize()-1)>>h.clusterBits*8]
	kind = entryKind(binary.BigEndian.Uint64(entries))
	i := 8
	for i < len(entries) && entryKind(binary.BigEndian.Uint64(entries[i:])) == kind {
		i += 8
	}
	return min(limit, int64(i/8)<<h.clusterBits-within), kind, nil
}

func (p piece) clip(limit int64) piece {
	p.n = min(p.n, limit)
	return p
}

// entry returns the first word of an L2 entry.
func (h *header) entry(table []byte, i int64) uint64 {
	return binary.BigEndian.Uint64(table[i*h.entrySize():])
}

// entryKind is the kind of an entry without subclusters.
func entryKind(e uint64) Kind {
	switch {
	case e == 0:
		return KindUnallocated
	case e&entryCompressed != 0:
		return KindCompressed
	case e&entryZero != 0:
		return KindZero
	case e&offsetMask == 0:
		return KindUnallocated
	}
	return KindData
}

// entryPiece describes the run that begins at byte within of a cluster, and ends in the cluster.
func (h *header) entryPiece(table []byte, i, within int64) piece {
	e := h.entry(table, i)
	rest := h.clusterSize() - within
	host := int64(e & offsetMask)
	if h.extended() && e&entryCompressed == 0 {
		return h.subclusterPiece(binary.BigEndian.Uint64(table[i*16+8:]), host, within)
	}
	p := piece{kind: entryKind(e), n: rest}
	switch p.kind {
	case KindCompressed:
		p.entry = e
	case KindData:
		p.host = host + within
	}
	return p
}

// subclusterPiece is entryPiece for a cluster with 32 subclusters. bits has two bits for each.
func (h *header) subclusterPiece(bits uint64, host, within int64) piece {
	sub := h.clusterSize() / 32
	kindOf := func(i int64) Kind {
		switch {
		case bits>>(32+i)&1 != 0:
			return KindZero
		case bits>>i&1 != 0:
			return KindData
		}
		return KindUnallocated
	}
	i := within / sub
	p := piece{kind: kindOf(i), n: sub - within%sub}
	if p.kind == KindData {
		p.host = host + within
	}
	for i++; i < 32 && kindOf(i) == p.kind; i++ {
		p.n += sub
	}
	return p
}

// Extent describes the run of one kind at off, at most length bytes. off and length must be inside
// the virtual size. It may have to read tables, as ReadAt does.
func (im *Image) Extent(ctx context.Context, off, length int64) (n int64, kind Kind, err error) {
	if off < 0 || length <= 0 || off > im.hdr.size-length {
		return 0, 0, fmt.Errorf("extent of %d bytes at %d is outside the image", length, off)
	}
	for n < length {
		m, next, err := im.sameKind(ctx, off+n, length-n)
		if err != nil {
			return 0, 0, err
		}
		if n > 0 && next != kind {
			break
		}
		kind = next
		n += m
	}
	return n, kind, nil
}

// Stored returns where the guest bytes at off are in the image's file, and how many of length bytes
// are there in one run, uncompressed. ok is false if they are compressed or not there. It looks at
// one L2 table only, and may have to read it. It does not fill the cache with tables, because its
// callers look at a whole disk.
func (im *Image) Stored(ctx context.Context, off, length int64) (host, n int64, ok bool) {
	if off < 0 || length <= 0 || off >= im.hdr.size {
		return 0, 0, false
	}
	p, err := im.locate(ctx, off, min(length, im.hdr.size-off), false)
	return p.host, p.n, err == nil && p.kind == KindData
}

// Decodes reports whether a read at off has to decompress a cluster that is not in the cache. below
// says that the content is the backing file's. Decodes does not wait for the file: if the table is
// not in memory, both are false.
func (im *Image) Decodes(off int64) (decodes, below bool) {
	h := im.hdr
	if off < 0 || off >= h.size {
		return false, false
	}
	cluster, perTable := off>>h.clusterBits, h.l2Entries()
	index := cluster / perTable
	if im.l1[index]&offsetMask == 0 {
		return false, true
	}
	table, ok := im.tables.peek(index)
	if !ok {
		return false, false
	}
	defer table.release()
	within := off & (h.clusterSize() - 1)
	kind := h.entryPiece(table.data, cluster%perTable, within).kind
	return kind == KindCompressed && !im.decoded.has(cluster, within+1), kind == KindUnallocated
}

// ReadAt reads guest bytes. Content that the image does not have comes from the backing file. It
// reads len(p) bytes or fails. A read across the end of the virtual size returns the bytes before
// the end, and io.EOF. If ctx ends, it stops waiting for data that other calls are loading, and its
// error is ctx's or the Reader's. The other calls go on.
func (im *Image) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at %d", off)
	}
	if off >= im.hdr.size {
		return 0, io.EOF
	}
	var short error
	if int64(len(p)) > im.hdr.size-off {
		p, short = p[:im.hdr.size-off], io.EOF
	}
	if im.willRead != nil && len(p) > 0 {
		im.announce(ctx, off, int64(len(p)))
	}
	done := 0
	for done < len(p) {
		at := off + int64(done)
		run, err := im.locate(ctx, at, int64(len(p)-done), true)
		if err != nil {
			return done, err
		}
		dst := p[done : done+int(run.n)]
		n := len(dst)
		switch run.kind {
		case KindZero:
			clear(dst)
		case KindUnallocated:
			err = im.readBacking(ctx, dst, at)
		case KindData:
			err = im.readHost(ctx, dst, run.host)
		case KindCompressed:
			if n, err = im.readCompressed(ctx, p[done:], at, run.entry); err != nil {
				done += n
				at += int64(n)
			}
		}
		if err != nil {
			return done, fmt.Errorf("guest offset %d: %w", at, err)
		}
		done += n
	}
	return done, short
}

// readHost reads stored bytes. If the file ends within the last cluster, the rest is zeros.
func (im *Image) readHost(ctx context.Context, p []byte, host int64) error {
	n := max(min(int64(len(p)), im.fileSize-host), 0)
	clear(p[n:])
	if n == 0 {
		return nil
	}
	return readFull(ctx, im.r, p[:n], host)
}

func (im *Image) readBacking(ctx context.Context, p []byte, off int64) error {
	n := int64(0)
	if im.backing != nil {
		n = max(min(int64(len(p)), im.backingSize-off), 0)
	}
	clear(p[n:])
	if n == 0 {
		return nil
	}
	if err := readFull(ctx, im.backing, p[:n], off); err != nil {
		return fmt.Errorf("backing file: %w", err)
	}
	return nil
}

// readFull fills p from r at off. If r ends earlier, the file has become shorter since it was
// opened. That is not the end of the disk, and another error than io.EOF.
func readFull(ctx context.Context, r Reader, p []byte, off int64) error {
	n, err := r.ReadAt(ctx, p, off)
	switch {
	case n == len(p):
		return nil
	case err == nil || errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	}
	return err
}
