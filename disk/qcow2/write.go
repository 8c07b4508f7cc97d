package qcow2

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"runtime"

	"golang.org/x/sync/errgroup"
)

// Compression says how Write stores clusters.
type Compression string

// The compressions.
const (
	CompressionZstd Compression = "zstd" // QEMU reads it since 5.1
	CompressionZlib Compression = "zlib" // every QEMU reads it; larger, and far slower to write
	CompressionNone Compression = "none"
)

// Source is a disk that Write stores.
type Source interface {
	Reader
	// Size is the virtual size in bytes, a positive multiple of 512.
	Size() int64
	// Data calls f for each run of bytes that may contain something other than zeros, in order and
	// without overlap. If f fails, Data ends and returns the error. With WriteOptions.Backing, the
	// runs are those that differ from the backing file. They are whole clusters of DeltaUnit bytes,
	// except at the end of the disk.
	Data(ctx context.Context, f func(off, n int64) error) error
}

// WriteOptions are the options of Write. The zero value works.
type WriteOptions struct {
	Compression Compression // "": zstd
	// Workers is the largest number of goroutines that read and compress. 0 means one for each
	// processor. The written image does not depend on it.
	Workers int
	// ReadUnit is how many bytes of the source are best read at once, such as its cluster size.
	ReadUnit int64
	// Progress is called by one goroutine with the work since the last call: bytes of the disk with
	// holes, and how many of them were in runs of data. It may be nil.
	Progress func(bytes, data int64)
	// Backing is the file that has all content outside of the runs of Data. The image names it, and
	// Write does not read it. All bytes of a run are stored, zeros too. The zero value: no such
	// file.
	Backing Backing

	clusterBits uint // 0: writtenClusterBits; tests use smaller ones
}

// Backing names the backing file of an image.
type Backing struct {
	Name   string // relative to the image; at most 1,023 bytes
	Format string // "raw" or "qcow2"
}

// DeltaUnit is the size of the clusters of written images. Bytes.
const DeltaUnit = 1 << writtenClusterBits

const (
	writtenClusterBits = 16 // qemu-img's default

	// writeUnit is how many bytes of the disk a worker takes at once.
	writeUnit = 256 << 10
	// maxWriteBuffers bounds the memory for data between the source and the file, and so the number
	// of workers. Bytes.
	maxWriteBuffers = 24 << 20
)

// Write stores a disk as an image of version 3 in the empty dst, and returns the image's size in
// bytes. The image depends only on the disk's content and on the compression, and not on the
// source's holes, the machine or the number of workers. Clusters of zeros are not stored. All
// tables that a reader needs are at the front, so the first read of a far image gets them.
//
// The header is written last. Until then, dst holds no image. An error of src or dst, or the end of
// ctx, ends Write and leaves a part of the image in dst.
func Write(ctx context.Context, dst io.WriterAt, src Source, opt WriteOptions) (int64, error) {
	w, err := newWriter(dst, src, opt)
	if err != nil {
		return 0, err
	}
	if err := w.run(ctx); err != nil {
		if ctx.Err() != nil { // a read that was ended may have wrapped ctx's error
			err = ctx.Err()
		}
		return 0, err
	}
	return w.finish(w.size, w.compression, w.backing)
}

// writer is one call of Write.
type writer struct {
	src         Source
	size        int64
	compression Compression
	workers     int
	unit        int64 // the most that a piece covers: whole clusters of one L2 table
	progress    func(bytes, data int64)
	backing     Backing

	// begins has for each L1 entry the number, from 1 on, of the first cluster in its part of the
	// disk that is not all zeros. 0 means that there is none, and that no L2 table is needed.
	begins []uint32
	placement

	unused chan *writePiece // while it is empty, walk waits for storeAll; this bounds the memory
	jobs   chan *writePiece // for the workers
	order  chan *writePiece // the same pieces for storeAll, in the order of the disk
}

func newWriter(dst io.WriterAt, src Source, opt WriteOptions) (*writer, error) {
	w := &writer{
		src: src, size: src.Size(), compression: opt.Compression, workers: opt.Workers,
		progress: opt.Progress, backing: opt.Backing,
		placement: placement{clusterBits: writtenClusterBits, out: output{dst: dst}},
	}
	if opt.clusterBits != 0 {
		w.clusterBits = opt.clusterBits
	}
	switch w.compression {
	case "":
		w.compression = CompressionZstd
	case CompressionZstd, CompressionZlib, CompressionNone:
	default:
		return nil, fmt.Errorf("compression %q is unknown: use %s, %s or %s",
			w.compression, CompressionZstd, CompressionZlib, CompressionNone)
	}
	if len(w.backing.Name) > maxNameLen || len(w.backing.Format) > maxFormatLen {
		return nil, fmt.Errorf("the name of the backing file, %.100q, or its format is too long",
			w.backing.Name)
	}
	switch limit := maxL1Bytes / 8 * w.tableReach(); {
	case w.size <= 0 || w.size%sectorSize != 0:
		return nil, fmt.Errorf("a disk of %d bytes is not stored as qcow2: "+
			"its size has to be a positive multiple of %d", w.size, sectorSize)
	case w.size > limit:
		return nil, fmt.Errorf("a disk of %d bytes is not stored as qcow2: "+
			"clusters of %d bytes allow at most %d", w.size, w.clusterSize(), limit)
	}
	w.unit = w.clusterSize()
	for w.unit < max(writeUnit, opt.ReadUnit) && w.unit < w.tableReach() {
		w.unit *= 2
	}
	if w.workers <= 0 {
		w.workers = runtime.GOMAXPROCS(0)
	}
	// Each worker has a piece, and another piece waits for it. A piece holds what was read, and its
	// compressed form.
	w.workers = max(1, min(w.workers, int(maxWriteBuffers/(4*w.unit))))
	if w.progress == nil {
		w.progress = func(int64, int64) {}
	}
	pieces := 2*w.workers + 1
	w.unused = make(chan *writePiece, pieces)
	w.jobs = make(chan *writePiece, pieces)
	w.order = make(chan *writePiece, pieces)
	for range pieces {
		w.unused <- &writePiece{ready: make(chan struct{}, 1)}
	}
	return w, nil
}

// run stores the clusters of the disk.
func (w *writer) run(ctx context.Context) error {
	if err := w.findTables(ctx); err != nil {
		return err
	}
	w.layOut(w.begins)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.walk(ctx) })
	for range w.workers {
		group.Go(func() error { return w.work(ctx) })
	}
	group.Go(func() error { return w.storeAll(ctx) })
	return group.Wait()
}

// isDelta reports whether Data calls f with the runs that differ from a backing file.
func (w *writer) isDelta() bool { return w.backing.Name != "" }

// findTables finds the parts of the disk that need an L2 table. It reads each part up to the first
// cluster that is not all zeros. The zeros before that cluster are not read again.
func (w *writer) findTables(ctx context.Context) error {
	w.begins = make([]uint32, (w.size-1)/w.tableReach()+1)
	var buf []byte
	return w.src.Data(ctx, func(off, n int64) error {
		for end := off + n; off < end; {
			table := off / w.tableReach()
			if w.begins[table] != 0 {
				off = (table + 1) * w.tableReach()
				continue
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			if w.isDelta() {
				w.begins[table] = uint32(off%w.tableReach()>>w.clusterBits) + 1
				continue
			}
			if buf == nil {
				buf = make([]byte, w.unit)
			}
			p := buf[:min(end, (off/w.unit+1)*w.unit)-off]
			if err := readFull(ctx, w.src, p, off); err != nil {
				return err
			}
			if first := firstNonZero(p); first >= 0 {
				w.begins[table] = uint32((off+int64(first))%w.tableReach()>>w.clusterBits) + 1
			}
			off += int64(len(p))
		}
		return ctx.Err()
	})
}

// zeros is compared with clusters.
var zeros [64 << 10]byte

func isZero(p []byte) bool {
	for len(p) > len(zeros) {
		if !bytes.Equal(p[:len(zeros)], zeros[:]) {
			return false
		}
		p = p[len(zeros):]
	}
	return bytes.Equal(p, zeros[:len(p)])
}

// firstNonZero returns the offset of the first sector of p that is not all zeros, or -1 if there is
// none.
func firstNonZero(p []byte) int {
	for i := 0; i < len(p); i += sectorSize {
		if !isZero(p[i:min(i+sectorSize, len(p))]) {
			return i
		}
	}
	return -1
}
