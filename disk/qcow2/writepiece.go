package qcow2

import "context"

// writePiece is a part of the disk on its way into the image. walk cuts it out, a worker reads and
// compresses it, and storeAll places it in the file. Then it is reused.
type writePiece struct {
	off, length int64 // of the disk; whole clusters, except at the end of the disk
	bytes, data int64 // for WriteOptions.Progress

	ready    chan struct{} // receives a value when the rest is there
	content  []byte        // whole clusters
	packed   []byte        // the compressed clusters, one after the other
	clusters []int         // for each cluster, its length in packed or one of these constants
}

const (
	clusterOfZeros = 0
	clusterPlain   = -1
)

// walk cuts the disk into pieces. It leaves out the zeros that are known.
func (w *writer) walk(ctx context.Context) error {
	defer close(w.order)
	defer close(w.jobs)
	var p *writePiece
	seen, sent, data := int64(0), int64(0), int64(0)
	send := func() {
		if p == nil {
			return
		}
		p.bytes, p.data = seen-sent, data
		sent, data = seen, 0
		w.order <- p
		w.jobs <- p
		p = nil
	}
	err := w.src.Data(ctx, func(off, n int64) error {
		for end := off + n; off < end; {
			table := off / w.tableReach()
			begin := (table + 1) * w.tableReach()
			if first := w.begins[table]; first != 0 {
				begin = table*w.tableReach() + int64(first-1)<<w.clusterBits
			}
			if off < begin {
				begin = min(begin, end)
				data += begin - off
				off, seen = begin, begin
				continue
			}
			if p != nil && (off/w.unit != p.off/w.unit || w.isDelta() && off > p.off+p.length) {
				send()
			}
			if p == nil {
				select {
				case p = <-w.unused:
				case <-ctx.Done():
					return ctx.Err()
				}
				p.off = off &^ (w.clusterSize() - 1)
			}
			stop := min(end, (off/w.unit+1)*w.unit)
			// The stored data must depend on the content alone, so whole clusters are read, with
			// their holes.
			p.length = min(w.roundUp(stop), w.size) - p.off
			data += stop - off
			off, seen = stop, stop
		}
		return ctx.Err()
	})
	if err == nil {
		send()
	}
	return err
}

// work reads and compresses pieces until there are none left.
func (w *writer) work(ctx context.Context) error {
	compress, err := newCompressor(w.compression)
	if err != nil {
		return err
	}
	for p := range w.jobs {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := p.encode(ctx, w, compress); err != nil {
			return err
		}
		p.ready <- struct{}{}
	}
	return nil
}

// encode reads the piece and compresses its clusters.
func (p *writePiece) encode(ctx context.Context, w *writer, compress compressor) error {
	if p.content == nil {
		p.content = make([]byte, 0, w.unit)
	}
	p.content = p.content[:w.roundUp(p.length)]
	clear(p.content[p.length:]) // for a cluster that reaches past the end of the disk
	if err := readFull(ctx, w.src, p.content[:p.length], p.off); err != nil {
		return err
	}
	p.packed, p.clusters = p.packed[:0], p.clusters[:0]
	for rest := p.content; len(rest) > 0; rest = rest[w.clusterSize():] {
		cluster, length := rest[:w.clusterSize()], clusterPlain
		if isZero(cluster) {
			length = clusterOfZeros
		} else if compress != nil {
			before := len(p.packed)
			p.packed = compress(p.packed, cluster)
			// A cluster that does not shrink is stored uncompressed, which is faster to read.
			if n := len(p.packed) - before; n < len(cluster) {
				length = n
			} else {
				p.packed = p.packed[:before]
			}
		}
		p.clusters = append(p.clusters, length)
	}
	return nil
}

// storeAll stores the pieces in the order of the disk.
func (w *writer) storeAll(ctx context.Context) error {
	for p := range w.order {
		select {
		case <-p.ready:
		case <-ctx.Done(): // a read may have failed
			return ctx.Err()
		}
		if err := w.store(p); err != nil {
			return err
		}
		w.progress(p.bytes, p.data)
		w.unused <- p
	}
	return ctx.Err()
}

func (w *writer) store(p *writePiece) error {
	content, packed := p.content, p.packed
	for i, length := range p.clusters {
		var err error
		guest := p.off>>w.clusterBits + int64(i)
		switch length {
		case clusterOfZeros:
			if w.isDelta() { // the backing file may have other content there
				err = w.enter(guest, entryZero)
			}
		case clusterPlain:
			err = w.storePlain(guest, content[:w.clusterSize()])
		default:
			err = w.storePacked(guest, packed[:length])
			packed = packed[length:]
		}
		if err != nil {
			return err
		}
		content = content[w.clusterSize():]
	}
	return nil
}
