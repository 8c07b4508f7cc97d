package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// oldFile is a file of an image that a new one is compared with. The index of the image has the
// digests of its chunks. Most of a disk stays as it was from one version to the next. So a chunk is
// first made from a disk that is here, as push would make it, and is right if it has the digest.
// Only a chunk that cannot be made is fetched. Either way, a read returns what the image has.
type oldFile struct {
	blob    *transport.Blob
	entry   *layer.IndexFile
	digests *io.SectionReader
	zeros   layer.Zeros
	id      string // of its content, as the name of a farFile
	here    *here
	came    atomic.Int64 // bytes that were fetched

	// An image that is qcow2 has these. places has for each chunk of the file the first cluster of
	// the disk that lies there, counted from 1, and the last one; 0: none does.
	content *qcow2.Image // nil: the file is a raw disk
	places  [][2]uint32
	ready   bool      // places are known; before that, nothing is made
	pack    sync.Pool // of functions that compress a cluster

	fetched *os.File                // has the chunks that were fetched, where they lie in the file
	locks   [16]sync.Mutex          // of chunks, by their numbers
	has     []bool                  // fetched has the chunk; guarded by the chunk's lock
	made    [16]map[int64]madeChunk // guarded by the lock; some chunks that were made
}

// madeChunk is a chunk that was made, and when it was last used.
type madeChunk struct {
	content []byte
	turn    int64
}

// madeChunks is how many chunks that were made are kept for each lock.
const madeChunks = 4

// here are disks on this machine that may have much of an old one.
type here struct {
	disks []*image.Image
	file  *os.File // perhaps the very file of the old disk; nil: there is none
	size  int64    // of file
}

// open opens a copy of the old disk. "": there is none.
func (h *here) open(path string, opt image.Options) error {
	if path == "" {
		return nil
	}
	img, err := image.Open(path, opt)
	if err != nil {
		return err
	}
	h.disks = append(h.disks, img)
	if h.file, err = osfile.OpenRegular(path); err != nil {
		return err
	}
	info, err := h.file.Stat()
	if err == nil {
		h.size = info.Size()
	}
	return err
}

// copied fills p with a chunk of the copy, and reports whether the old file has the same one.
func (h *here) copied(p []byte, chunk int64, o *oldFile) bool {
	return h.file != nil && h.size == o.entry.Size &&
		osfile.ReadFull(h.file, p, chunk*layer.IndexChunk) == nil &&
		checkDigest(o.digests, chunk, p) == nil
}

func (h *here) close() (err error) {
	for _, img := range h.disks {
		err = errors.Join(err, img.Close())
	}
	if h.file != nil {
		err = errors.Join(err, h.file.Close())
	}
	return err
}

// newOldFile opens a file of the index. Until it has learned, all of its chunks are fetched.
func newOldFile(blob *transport.Blob, x *layer.Index, f *layer.IndexFile,
	here *here) (_ *oldFile, err error) {
	o := &oldFile{blob: blob, entry: f, here: here,
		digests: io.NewSectionReader(x.Digests, f.FirstChunk*layer.DigestSize,
			f.Chunks(layer.IndexChunk)*layer.DigestSize),
		has: make([]bool, f.Chunks(layer.IndexChunk))}
	if o.fetched, err = nameless(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", f.Name, err), o.Close())
		}
	}()
	for i := range o.made {
		o.made[i] = make(map[int64]madeChunk)
	}
	o.id, o.zeros, err = ofDigests(f.Size, layer.IndexChunk, o.digests)
	if err != nil {
		return nil, err
	}
	return o, nil
}

// learn learns from the tables of a qcow2 file where everything lies. From then on, chunks are
// made.
func (o *oldFile) learn(ctx context.Context) error {
	head := make([]byte, min(o.entry.Size, 4))
	err := o.fill(ctx, head, 0)
	if err == nil && qcow2.IsQcow2(head) {
		o.content, err = qcow2.Open(ctx, o, o.entry.Size, qcow2.Options{})
		if err == nil {
			err = o.findPlaces(ctx)
		}
	}
	o.ready = err == nil
	return err
}

func (o *oldFile) findPlaces(ctx context.Context) error {
	o.places = make([][2]uint32, len(o.has))
	cluster := o.content.Info().ClusterSize
	return o.content.Places(ctx, 0, func(p qcow2.Place) bool {
		for c := p.Host / layer.IndexChunk; c*layer.IndexChunk < p.Host+p.Length; c++ {
			if c < int64(len(o.places)) {
				number := uint32(p.Guest/cluster) + 1
				o.places[c] = [2]uint32{cmp.Or(o.places[c][0], number), number}
			}
		}
		return true
	})
}

// farApart is how many clusters may lie between two of one chunk. Write puts them one behind the
// other, but for small ones, which fill gaps.
const farApart = 1 << 16

// in calls visit for each cluster of the disk that lies in a chunk of the file, until it returns
// false. It visits none if they are all over the disk.
func (o *oldFile) in(ctx context.Context, chunk int64, visit func(qcow2.Place) bool) error {
	first, last := int64(o.places[chunk][0])-1, int64(o.places[chunk][1])-1
	if first < 0 || last-first > farApart {
		return nil
	}
	size := o.content.Info().ClusterSize
	begin, end := chunk*layer.IndexChunk, (chunk+1)*layer.IndexChunk
	return o.content.Places(ctx, first*size, func(at qcow2.Place) bool {
		here := at.Kind != qcow2.KindZero && at.Host < end && at.Host+at.Length > begin
		return at.Guest <= last*size && (!here || visit(at))
	})
}

// fill fills p from off on, or fails.
func (o *oldFile) fill(ctx context.Context, p []byte, off int64) error {
	n, err := o.ReadAt(ctx, p, off)
	if n < len(p) {
		return transport.UnexpectedEnd(err)
	}
	return nil
}

func (o *oldFile) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 || off >= o.entry.Size {
		return 0, io.EOF
	}
	if off+int64(len(p)) > o.entry.Size {
		p, err = p[:o.entry.Size-off], io.EOF
	}
	for n < len(p) {
		at := off + int64(n)
		length, zero := o.zeros.Run(at, int64(len(p)-n))
		part := p[n : n+int(length)]
		if zero {
			clear(part)
			n += len(part)
			continue
		}
		chunk := at / layer.IndexChunk
		part = part[:min(int64(len(part)), (chunk+1)*layer.IndexChunk-at)]
		if err := o.chunk(ctx, part, chunk, at-chunk*layer.IndexChunk); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, err
}

// chunk fills p with the bytes at within of a chunk.
func (o *oldFile) chunk(ctx context.Context, p []byte, chunk, within int64) error {
	i := chunk % int64(len(o.locks))
	lock, made := &o.locks[i], o.made[i]
	lock.Lock()
	defer lock.Unlock()
	if o.has[chunk] {
		return osfile.ReadFull(o.fetched, p, chunk*layer.IndexChunk+within)
	}
	if m, ok := made[chunk]; ok {
		copy(p, m.content[within:])
		return nil
	}
	all := make([]byte, min(layer.IndexChunk, o.entry.Size-chunk*layer.IndexChunk))
	if o.here.copied(all, chunk, o) {
		copy(p, all[within:])
		return nil
	}
	for _, g := range o.here.disks {
		if ok, err := o.make(ctx, g, all, chunk); err != nil {
			return err
		} else if ok {
			oldest, turn := chunk, int64(0)
			for c, m := range made {
				if turn = max(turn, m.turn); oldest == chunk || m.turn < made[oldest].turn {
					oldest = c
				}
			}
			if len(made) == madeChunks {
				delete(made, oldest)
			}
			made[chunk] = madeChunk{content: all, turn: turn + 1}
			copy(p, all[within:])
			return nil
		}
	}
	if err := o.fetch(ctx, all, chunk); err != nil {
		return err
	}
	if _, err := o.fetched.WriteAt(all, chunk*layer.IndexChunk); err != nil {
		return err
	}
	o.has[chunk] = true
	copy(p, all[within:])
	return nil
}

// make makes a chunk of the file from a disk, and reports whether it is right.
func (o *oldFile) make(ctx context.Context, from *image.Image, p []byte, chunk int64) (bool,
	error) {
	begin := chunk * layer.IndexChunk
	switch {
	case !o.ready:
		return false, nil
	case o.content == nil:
		if err := readDisk(ctx, from, p, begin); err != nil {
			return false, err
		}
		return checkDigest(o.digests, chunk, p) == nil, nil
	}
	compress, ok := o.pack.Get().(func(dst, cluster []byte) []byte)
	if !ok {
		var err error
		if compress, err = o.content.Compressor(); err != nil {
			return false, err
		}
	}
	defer o.pack.Put(compress)
	clear(p)
	cluster, packed, different := make([]byte, o.content.Info().ClusterSize), []byte(nil), false
	var err error
	walkErr := o.in(ctx, chunk, func(at qcow2.Place) bool {
		if err = readDisk(ctx, from, cluster, at.Guest); err != nil {
			return false
		}
		content := cluster
		if at.Kind == qcow2.KindCompressed {
			packed = compress(packed[:0], cluster)
			if different = int64(len(packed)) > at.Length; different {
				return false
			}
			content = packed
		}
		if skip := begin - at.Host; skip < int64(len(content)) {
			copy(p[max(-skip, 0):], content[max(skip, 0):])
		}
		return true
	})
	if err := errors.Join(err, walkErr); err != nil || different {
		return false, err
	}
	return checkDigest(o.digests, chunk, p) == nil, nil
}

// readDisk fills p from a disk. Behind its end there are zeros.
func readDisk(ctx context.Context, from *image.Image, p []byte, off int64) error {
	n := int(max(0, min(int64(len(p)), from.Size()-off)))
	clear(p[n:])
	if n == 0 {
		return nil
	}
	got, err := from.ReadAtContext(ctx, p[:n], off)
	if got < n {
		return transport.UnexpectedEnd(err)
	}
	return nil
}

// fetch fetches a chunk, and verifies it.
func (o *oldFile) fetch(ctx context.Context, p []byte, chunk int64) error {
	check := func() error { return checkDigest(o.digests, chunk, p) }
	for try := 1; ; try++ {
		n, err := o.blob.ReadChecked(ctx, p, o.entry.Offset+chunk*layer.IndexChunk, check)
		o.came.Add(int64(n))
		if n < len(p) {
			return transport.UnexpectedEnd(err)
		}
		if err := check(); err == nil || !o.blob.Again(err, try) {
			return err
		}
	}
}

// blocks are the blocks of the disk that lie in a chunk of the file, as in a boot order.
func (o *oldFile) blocks(ctx context.Context, chunk int64) (runs []BootRun, err error) {
	if o.content == nil {
		return []BootRun{{First: chunk * layer.IndexChunk / BootBlock,
			Count: layer.IndexChunk / BootBlock}}, nil
	}
	err = o.in(ctx, chunk, func(at qcow2.Place) bool {
		runs = append(runs, BootRun{First: at.Guest / BootBlock,
			Count: max(1, o.content.Info().ClusterSize/BootBlock)})
		return true
	})
	return runs, err
}

func (o *oldFile) Size() int64                { return o.entry.Size }
func (o *oldFile) Identity() image.Identity   { return image.Identity{Digest: o.id} }
func (o *oldFile) Parallel() int              { return 1 }
func (o *oldFile) WillRead(off, length int64) {}
func (o *oldFile) Check() error               { return nil }

func (o *oldFile) Extent(off, length int64) (disk.Extent, error) {
	if off < 0 || off >= o.entry.Size {
		return disk.Extent{}, errors.New("an extent outside of the file")
	}
	n, zero := o.zeros.Run(off, min(length, o.entry.Size-off))
	return disk.Extent{Length: n, Data: !zero}, nil
}

func (o *oldFile) Close() error {
	if o == nil || o.fetched == nil {
		return nil
	}
	return o.fetched.Close()
}

// nameless makes a file in the directory for temporary files.
func nameless() (*os.File, error) { return osfile.Nameless("") }
