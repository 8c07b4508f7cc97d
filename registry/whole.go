package registry

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"time"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// wholeFile is a file of the index. Each of its chunks was verified when it was read. When all
// were, it can check that they are the same as in the layer: then a program that reads the layer,
// to scan or to pull it, sees what the guest sees.
type wholeFile struct {
	*farFile
	stream *Stream
	layer  *transport.Blob
	entry  *layer.IndexFile
	pause  time.Duration // between two tries of Verify
}

var _ image.Unsure = (*wholeFile)(nil)

// Unverified is false: every byte that was returned has the digest in the index.
func (w *wholeFile) Unverified() bool { return false }

// Agree compares the index with the layers of the image, and what it has of this file with that.
func (w *wholeFile) Agree(ctx context.Context) error {
	if err := w.stream.compare(ctx); err != nil {
		return err
	}
	if w.tables != nil {
		for _, r := range w.tables.Ranges {
			w.WillRead(r[0], r[1])
		}
	}
	return w.verdict.condemn(compareTables(ctx, w.entry.Name, w.tables, w.stored))
}

const (
	// maxAround is how much of a layer may lie around the file for the check to be made. Bytes.
	maxAround = 4 << 20
	// wholeTries is how often the bytes around the file are fetched. No digest of their own tells
	// whether they are right.
	wholeTries = 3
)

// Verify checks the whole layer against its digest, if most of it is at hand. It is called when the
// disk has copied the whole image, so it usually fetches nothing.
func (w *wholeFile) Verify(ctx context.Context) error {
	size := w.layer.Desc.Size
	if size-w.Size() > maxAround {
		return nil
	}
	got := ""
	for try := range wholeTries {
		if try > 0 {
			if err := transport.PauseFor(ctx, w.pause); err != nil {
				return err
			}
		}
		h := sha256.New()
		if err := w.around(ctx, h, 0, w.entry.Offset); err != nil {
			return err
		}
		if whole, err := w.file(ctx, h); !whole || err != nil {
			return err
		}
		if err := w.around(ctx, h, w.entry.Offset+w.Size(), size); err != nil {
			return err
		}
		if got = transport.DigestIn(h); got == w.layer.Desc.Digest.String() {
			return nil
		}
	}
	return w.verdict.condemn(disagrees("it describes a layer of the digest %s, and not %s", got,
		w.layer.Desc.Digest))
}

// around hashes the bytes before or behind the file, and waits for them.
func (w *wholeFile) around(ctx context.Context, h hash.Hash, off, end int64) error {
	p := make([]byte, end-off)
	for pause := transport.FirstPause; len(p) > 0; pause = min(2*pause, transport.LongPause) {
		n, err := w.layer.ReadAt(ctx, p, off)
		if n == len(p) {
			break
		}
		w.warn(fmt.Sprintf("%v; the layer cannot be verified yet, next try in %s", err, pause))
		if err := transport.PauseFor(ctx, pause); err != nil {
			return err
		}
	}
	h.Write(p)
	return nil
}

// file hashes the file. whole is false if the cache has lost so much of the file that it is not
// worth fetching again: what was read was verified anyway.
func (w *wholeFile) file(ctx context.Context, h hash.Hash) (whole bool, err error) {
	p, before := make([]byte, w.chunk), w.came.Load()
	for off := int64(0); off < w.Size(); off += int64(len(p)) {
		p = p[:min(w.chunk, w.Size()-off)]
		if n, zero := w.blob.run(off, int64(len(p))); zero && n == int64(len(p)) {
			clear(p)
		} else if n, err := w.blob.ReadAt(ctx, p, off); n < len(p) {
			if ctx.Err() != nil {
				return false, ctx.Err()
			}
			w.warn(fmt.Sprintf("%v; the layer is not verified as a whole", err))
			return false, nil
		}
		if w.came.Load()-before > w.Size()/8+maxAround {
			return false, nil
		}
		h.Write(p)
	}
	return true, nil
}
