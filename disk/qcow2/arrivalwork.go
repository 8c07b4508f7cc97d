package qcow2

import (
	"context"
	"io"
)

// arrivalJob is a part of the file with the data of some clusters, for a worker.
type arrivalJob struct {
	begin, end int64 // in the file
	data       []byte
	items      []arrivalItem
}

// takes reports whether the item fits into the batch.
func (j *arrivalJob) takes(item arrivalItem) bool {
	same := item.entry&entryCompressed == j.items[0].entry&entryCompressed
	return same && item.off <= j.end+arrivalGap && item.end-j.begin <= arrivalBatch &&
		len(j.items) < arrivalItems
}

func (j *arrivalJob) add(item arrivalItem) {
	j.items = append(j.items, item)
	j.end = max(j.end, item.end)
}

// load copies the batch out of the file. If the file ends within the last cluster, the rest of an
// uncompressed cluster is zeros. Compressed data ends there: zeros behind it could decode to
// anything.
func (j *arrivalJob) load(w *window, fileSize int64) error {
	there := min(j.end, fileSize) - j.begin
	data, err := w.some(j.begin, there)
	if err != nil {
		return err
	}
	end := j.begin + int64(len(data))
	for i := range j.items {
		item := &j.items[i]
		if item.off >= end {
			return bad("the data of guest offset %d lies at %#x, past the end of the file",
				item.guest, item.off)
		}
		if item.entry&entryCompressed != 0 {
			item.end = min(item.end, end)
		}
	}
	n := int(j.end - j.begin)
	if cap(j.data) < n {
		j.data = make([]byte, n)
	}
	j.data = j.data[:n]
	clear(j.data[copy(j.data, data):])
	return nil
}

// work writes the jobs that the reader hands out.
func (a *Arrival) work(ctx context.Context, jobs <-chan *arrivalJob) error {
	var buf []byte
	for j := range jobs {
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		switch {
		case j.items[0].entry&entryCompressed != 0:
			if buf == nil {
				buf = make([]byte, max(arrivalBatch, a.hdr.clusterSize()))
			}
			err = a.unpack(j, buf)
		case a.hdr.extended():
			err = a.pieces(j)
		default:
			err = a.plain(j)
		}
		if err != nil {
			return err
		}
		j.items = j.items[:0]
		a.unused.Put(j)
	}
	return nil
}

func (a *Arrival) write(p []byte, guest int64) error {
	return a.guest.Write(p[:min(int64(len(p)), a.hdr.size-guest)], guest)
}

// unpack decodes clusters. It writes neighbouring clusters of the guest in one call.
func (a *Arrival) unpack(j *arrivalJob, buf []byte) error {
	size := a.hdr.clusterSize()
	n, first := int64(0), int64(0) // bytes in buf, and their guest offset
	for _, item := range j.items {
		if n > 0 && (item.guest != first+n || n+size > int64(len(buf))) {
			if err := a.write(buf[:n], first); err != nil {
				return err
			}
			n = 0
		}
		if n == 0 {
			first = item.guest
		}
		if err := a.codec.decode(buf[n:n+size], j.data[item.off-j.begin:item.end-j.begin],
			item.off); err != nil {
			return err
		}
		n += size
	}
	return a.write(buf[:n], first)
}

// plain writes clusters that are stored uncompressed.
func (a *Arrival) plain(j *arrivalJob) error {
	for i := 0; i < len(j.items); {
		first, last := j.items[i], j.items[i]
		for i++; i < len(j.items) && j.items[i].off == last.end && j.items[i].guest-first.guest ==
			last.end-first.off; i++ {
			last = j.items[i]
		}
		if err := a.write(j.data[first.off-j.begin:last.end-j.begin], first.guest); err != nil {
			return err
		}
	}
	return nil
}

// pieces writes clusters whose subclusters differ in kind.
func (a *Arrival) pieces(j *arrivalJob) error {
	for _, item := range j.items {
		for within := int64(0); within < a.hdr.clusterSize() && item.guest+within < a.hdr.size; {
			p := a.hdr.entryPiece(item.raw, item.i, within)
			var err error
			switch {
			case p.kind == KindData:
				err = a.write(j.data[item.off-j.begin+within:][:p.n], item.guest+within)
			case p.kind == KindZero && a.guest.Zero != nil:
				err = a.guest.Zero(item.guest+within, min(p.n, a.hdr.size-item.guest-within))
			}
			if err != nil {
				return err
			}
			within += p.n
		}
	}
	return nil
}

// window is the part of a file that is passing, and some of what has passed.
type window struct {
	in   io.Reader
	base int64 // place of buf in the file; nothing before it can be read any more
	buf  []byte
	keep int64 // how many passed bytes are kept at least
	// short says that the file may end before the size that is known
	short, ended bool
}

// windowSize is how many bytes are read at once, unless more are needed.
const windowSize = 1 << 20

// at returns a part of the file. It is valid until the next call, which may forget data that is
// more than w.keep before off.
func (w *window) at(off, length int64) ([]byte, error) {
	if need := off - w.base + length; need > int64(len(w.buf)) {
		if err := w.fill(off, length); err != nil {
			return nil, err
		}
	}
	return w.buf[off-w.base:][:length], nil
}

// some is at, but returns a shorter part if the file ends there and may do so.
func (w *window) some(off, length int64) ([]byte, error) {
	data, err := w.at(off, length)
	if err == nil || !w.short || !w.ended {
		return data, err
	}
	there := w.buf[min(off-w.base, int64(len(w.buf))):]
	return there[:min(length, int64(len(there)))], nil
}

// fill reads on until the requested range is in the window.
func (w *window) fill(off, length int64) error {
	if gone := off - w.keep - w.base; gone > 0 {
		if gone > int64(len(w.buf)) {
			n, err := io.CopyN(io.Discard, w.in, gone-int64(len(w.buf)))
			if err != nil {
				w.base, w.buf = w.base+int64(len(w.buf))+n, w.buf[:0]
				return w.cut(err)
			}
			w.buf = w.buf[:0]
		}
		w.buf = w.buf[:copy(w.buf, w.buf[min(gone, int64(len(w.buf))):])]
		w.base += gone
	}
	need := off - w.base + length
	if need > int64(cap(w.buf)) {
		grown := make([]byte, len(w.buf), need+windowSize)
		copy(grown, w.buf)
		w.buf = grown
	}
	for int64(len(w.buf)) < need {
		n, err := w.in.Read(w.buf[len(w.buf):cap(w.buf)])
		if w.buf = w.buf[:len(w.buf)+n]; err != nil && int64(len(w.buf)) < need {
			return w.cut(err)
		}
	}
	return nil
}

// cut is the error for a file that ends before what its header or a table names.
func (w *window) cut(err error) error {
	if w.ended = err == io.EOF; w.ended {
		return io.ErrUnexpectedEOF
	}
	return err
}
