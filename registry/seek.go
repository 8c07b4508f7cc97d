package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"kubevirt.io/disk/internal/inflate"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// seekable is the content of a gzip layer with checkpoints. Reads fetch ranges of the layer,
// decompress from a checkpoint on, verify the result, and keep it in a cache.
type seekable struct {
	layer  *transport.Blob
	points *layer.Checkpoints
	cached *cache.Blob
	zeros  layer.Zeros
	name   string // of the content
}

func newSeekable(c *cache.Cache, from *transport.Blob, points *layer.Checkpoints) (*seekable,
	error) {
	digests := make([]byte, 0, points.Count()*sha256.Size)
	for i := range points.Count() {
		digests = append(digests, points.Entry(i).Digest...)
	}
	s := &seekable{layer: from, points: points}
	var err error
	s.name, s.zeros, err = ofDigests(points.Size, points.Chunk, layer.SectionOf(digests))
	if err != nil {
		return nil, err
	}
	s.cached, err = c.Blob(cache.BlobOptions{Digest: s.name, Size: points.Size,
		ChunkSize: points.Chunk, Fetch: s.fetch, Verify: s.verify})
	return s, err
}

func (s *seekable) verify(chunk int64, p []byte) error {
	got, want := sha256.Sum256(p), s.points.Entry(chunk).Digest
	if !bytes.Equal(got[:], want) {
		return &transport.DigestError{Want: fmt.Sprintf("sha256:%x", want),
			Got: fmt.Sprintf("sha256:%x", got)}
	}
	return nil
}

// fetch brings a chunk. It leaves content that cannot be decompressed as it is, because verify will
// find it wrong.
func (s *seekable) fetch(ctx context.Context, p []byte, off int64) error {
	chunk := off / s.points.Chunk
	begin, length := s.points.Span(chunk)
	in := s.layer.Stream(ctx, begin, length)
	defer in.Close()
	from := &keepsError{Reader: in}
	err := s.points.Read(from, chunk, p)
	switch {
	case from.err != nil:
		return from.err
	case errors.Is(err, layer.ErrCheckpoints) || errors.Is(err, inflate.ErrCheckpoint):
		return err
	}
	in.Doubt(func() error { return s.verify(chunk, p) })
	return nil
}

// keepsError keeps the error of a reader, so that it is not taken for an error of the decompressor.
type keepsError struct {
	io.Reader
	err error // nil: none, or io.EOF
}

func (k *keepsError) Read(p []byte) (int, error) {
	n, err := k.Reader.Read(p)
	if err != nil && err != io.EOF {
		k.err = err
	}
	return n, err
}

// seekablePart is a file in such a layer.
type seekablePart struct {
	of        *seekable
	off, size int64
}

func (f seekablePart) Size() int64 { return f.size }

func (f seekablePart) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	var end error
	if off+int64(len(p)) > f.size {
		p, end = p[:max(0, f.size-off)], io.EOF
	}
	n, err := f.of.cached.ReadAt(ctx, p, f.off+off)
	if err == nil {
		err = end
	}
	return n, err
}

func (f seekablePart) Prefetch(off, length int64) {
	f.of.cached.Prefetch(f.off+off, min(length, f.size-off))
}

func (f seekablePart) Has(off, length int64) bool {
	return f.of.cached.Has(f.off+off, min(length, f.size-off))
}

func (f seekablePart) run(off, length int64) (n int64, zero bool) {
	return f.of.zeros.Run(f.off+off, min(length, f.size-off))
}

// seekDisks are the disks of an image that was once fetched as a whole, and then removed to make
// room. They are read by ranges, and look as before: like raw files.
type seekDisks struct {
	layers map[string]*seekable // by digest
	files  []*os.File
	disks  map[string]*seekDisk // by the name of the raw file
}

func (d *seekDisks) close() (err error) {
	for _, one := range d.disks {
		err = errors.Join(err, one.image.Close())
	}
	for _, f := range d.files {
		err = errors.Join(err, f.Close())
	}
	return err
}
