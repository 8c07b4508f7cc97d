package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/cache"
)

// farReads is how many reads of a file in a registry are worth having on their way at once.
const farReads = 16

type descriptor = v1.Descriptor

// farFile is a file in a layer that is not compressed, of which an index has the digests. What is read
// of it is fetched in chunks, verified, and kept in a cache.
type farFile struct {
	blob *cache.Blob
	name string // digest of the file's chunk digests
	warn func(text string)
}

var _ image.Source = (*farFile)(nil)

// newFarFile opens a file of a layer.
func newFarFile(c *cache.Cache, layer *blob, x *index, f *indexFile, warn func(string)) (*farFile, error) {
	first := f.FirstChunk * digestSize
	digests := x.chunks[first : first+f.chunks(x.ChunkSize)*digestSize]
	far := &farFile{name: chunksDigest(f.Size, x.ChunkSize, digests), warn: warn}
	size := max(x.ChunkSize, cache.MinChunkSize)
	var err error
	far.blob, err = c.Blob(cache.BlobOptions{
		Digest: far.name, Size: f.Size, ChunkSize: size,
		Fetch: func(ctx context.Context, p []byte, off int64) error {
			n, err := layer.ReadAt(ctx, p, f.Offset+off)
			if n == len(p) {
				return nil
			}
			return unexpectedEnd(err)
		},
		Verify: func(chunk int64, p []byte) error {
			digest := digests[chunk*(size/x.ChunkSize)*digestSize:]
			for i := int64(0); len(p) > 0; i++ {
				n := min(int64(len(p)), x.ChunkSize)
				sum := sha256.Sum256(p[:n])
				if want := digest[i*digestSize:][:digestSize]; !bytes.Equal(sum[:], want) {
					return &DigestError{Want: "sha256:" + hex.EncodeToString(want),
						Got: "sha256:" + hex.EncodeToString(sum[:])}
				}
				p = p[n:]
			}
			return nil
		},
	})
	return far, err
}

// chunksDigest names a file by the digests of its chunks: where they are the same, so is the file, in
// whichever layer it is.
func chunksDigest(size, chunkSize int64, digests []byte) string {
	h := sha256.New()
	h.Write([]byte("kubevirt-disk chunks\n"))
	_ = binary.Write(h, binary.LittleEndian, []int64{size, chunkSize})
	h.Write(digests)
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

// ReadAt waits for what cannot be fetched now until ctx ends: registries come back, and what was wrong
// may be right when it is fetched again.
func (f *farFile) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	for pause := firstPause; ; pause = min(2*pause, longPause) {
		n, err := f.blob.ReadAt(ctx, p, off)
		switch {
		case err == nil || err == io.EOF:
			return n, err
		case ctx.Err() != nil:
			return n, fmt.Errorf("%w: %w", disk.ErrNotNow, err)
		}
		wait := pause
		var status *StatusError
		if errors.As(err, &status) {
			wait = max(wait, min(status.after, maxRetryAfter))
		}
		f.warn(fmt.Sprintf("%v; a read waits, next try in %s", err, wait))
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return n, fmt.Errorf("%w: %w", disk.ErrNotNow, err)
		}
	}
}

// maxRetryAfter is for how long a registry may ask not to be asked.
const maxRetryAfter = time.Minute

func (f *farFile) Size() int64 { return f.blob.Size() }

func (f *farFile) Identity() image.Identity { return image.Identity{Digest: f.name} }

func (f *farFile) Parallel() int { return farReads }

// Extent says that everything is data: nothing else is known before it is fetched.
func (f *farFile) Extent(off, length int64) (disk.Extent, error) {
	if off < 0 || off >= f.Size() {
		return disk.Extent{}, fmt.Errorf("an extent at %d of %d bytes", off, f.Size())
	}
	return disk.Extent{Length: min(length, f.Size()-off), Data: true}, nil
}

func (f *farFile) WillRead(off, length int64) {
	if off >= 0 && off < f.Size() {
		f.blob.Prefetch(off, length)
	}
}

// Check returns nil: what has a digest never changes.
func (f *farFile) Check() error { return nil }

// Close leaves the chunks to the cache.
func (f *farFile) Close() error { return nil }
