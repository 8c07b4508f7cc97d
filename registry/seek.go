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
)

// seekable is the content of a gzip layer with checkpoints. Reads fetch ranges of the layer,
// decompress from a checkpoint on, verify the result, and keep it in a cache.
type seekable struct {
	layer  *blob
	points *checkpoints
	cached *cache.Blob
	zeros  zeroChunks
	name   string // of the content
}

func newSeekable(c *cache.Cache, layer *blob, points *checkpoints) (*seekable, error) {
	digests := make([]byte, 0, points.count()*sha256.Size)
	for i := range points.count() {
		digests = append(digests, points.entry(i).digest...)
	}
	s := &seekable{layer: layer, points: points,
		name:  chunksDigest(points.size, points.chunk, digests),
		zeros: newZeroChunks(points.size, points.chunk, digests)}
	var err error
	s.cached, err = c.Blob(cache.BlobOptions{Digest: s.name, Size: points.size,
		ChunkSize: points.chunk, Fetch: s.fetch, Verify: s.verify})
	return s, err
}

func (s *seekable) verify(chunk int64, p []byte) error {
	got, want := sha256.Sum256(p), s.points.entry(chunk).digest
	if !bytes.Equal(got[:], want) {
		return &DigestError{Want: fmt.Sprintf("sha256:%x", want),
			Got: fmt.Sprintf("sha256:%x", got)}
	}
	return nil
}

// fetch brings a chunk. It leaves content that cannot be decompressed as it is, because verify will
// find it wrong.
func (s *seekable) fetch(ctx context.Context, p []byte, off int64) error {
	chunk := off / s.points.chunk
	begin, length := s.points.span(chunk)
	in := s.layer.stream(ctx, begin, length)
	defer in.Close()
	from := &keepsError{Reader: in}
	err := s.points.read(from, chunk, p)
	switch {
	case from.err != nil:
		return from.err
	case errors.Is(err, errCheckpoints) || errors.Is(err, inflate.ErrCheckpoint):
		return err
	}
	if f, ok := in.(*fetch); ok && f.matters() && s.verify(chunk, p) != nil {
		f.wrong()
	}
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

func (f seekablePart) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off+int64(len(p)) > f.size {
		p, err = p[:max(0, f.size-off)], io.EOF
	}
	for n < len(p) {
		at := f.off + off + int64(n)
		length, zero := f.of.zeros.run(at, int64(len(p)-n))
		part := p[n : n+int(length)]
		if zero {
			clear(part)
			n += len(part)
			continue
		}
		got, err := f.of.cached.ReadAt(ctx, part, at)
		if n += got; err != nil && got < len(part) {
			return n, err
		}
	}
	return n, err
}

func (f seekablePart) Prefetch(off, length int64) {
	at, end := f.off+off, f.off+min(off+length, f.size)
	for at < end {
		n, zero := f.of.zeros.run(at, end-at)
		if !zero {
			f.of.cached.Prefetch(at, n)
		}
		at += n
	}
}

// hole returns how far the run at off goes, and whether it is zeros.
func (f seekablePart) hole(off int64) (length int64, hole bool) {
	return f.of.zeros.run(f.off+off, f.size-off)
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
