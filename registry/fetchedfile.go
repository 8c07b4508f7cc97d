package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
)

// fetchedDiskSource is a disk of a fetched image. It is near, unless somebody damages it.
type fetchedDiskSource struct {
	*farFile
	raw *rawChunks
}

func (fetchedDiskSource) Parallel() int { return 1 }

func (s fetchedDiskSource) Close() error { return s.raw.close() }

// openDisk opens a disk. Its identity comes from the digest of the manifest.
func (f *fetchedImage) openDisk(_ context.Context, name string) (image.Source, error) {
	d := f.disks.find(name)
	if d == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	chunks, err := layer.NewChunks(d.Size, layer.IndexChunk, d.digests)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	r := &rawChunks{of: f, disk: d, chunks: chunks,
		checked: make([]atomic.Bool, d.digests.Size()/layer.DigestSize)}
	_ = r.reopen() // if that fails, its first read mends it
	return fetchedDiskSource{&farFile{farOptions: farOptions{warn: f.s.warnOf(name)}, blob: r,
		name: rawDigest(f.s.image.Digest, name), chunk: layer.IndexChunk}, r}, nil
}

// rawChunks are the chunks of a raw file that was made from an image. Like those of the cache, each
// is verified when this process first uses it.
type rawChunks struct {
	of     *fetchedImage
	disk   *fetchedDisk
	chunks *layer.Chunks

	file    atomic.Pointer[os.File] // nil: it cannot be opened
	checked []atomic.Bool           // by chunk

	mu   sync.Mutex
	open []*os.File // guarded by mu; all that were in file
}

// reopen opens the file that has the name now.
func (r *rawChunks) reopen() error {
	f, err := r.of.root.OpenFile(path.Join(r.of.dir, r.disk.Name), os.O_RDONLY)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = append(r.open, f)
	r.file.Store(f)
	return nil
}

func (r *rawChunks) close() (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.open {
		err = errors.Join(err, f.Close())
	}
	r.open = nil
	return err
}

func (r *rawChunks) Size() int64 { return r.disk.Size }

func (r *rawChunks) run(off, length int64) (int64, bool) { return r.chunks.Run(off, length) }

// Prefetch asks the kernel to read ahead. If that fails, the file is read when it is needed.
func (r *rawChunks) Prefetch(off, length int64) {
	if f := r.file.Load(); f != nil {
		_ = osfile.Call(f, func(fd int) error {
			return unix.Fadvise(fd, off, length, unix.FADV_WILLNEED)
		})
	}
}

// Has is true: to read ahead is the kernel's business.
func (r *rawChunks) Has(off, length int64) bool { return true }

func (r *rawChunks) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	for n < len(p) {
		got, err := r.readPart(ctx, p[n:], off+int64(n))
		if n += got; err != nil {
			return n, err
		}
	}
	return n, nil
}

// readPart reads either the part of p that was verified before, or up to the end of a chunk.
func (r *rawChunks) readPart(ctx context.Context, p []byte, off int64) (int, error) {
	chunk := off / layer.IndexChunk
	ready := off
	for ready < off+int64(len(p)) && r.checked[ready/layer.IndexChunk].Load() {
		ready = (ready/layer.IndexChunk + 1) * layer.IndexChunk
	}
	if ready > off {
		part := p[:min(int64(len(p)), ready-off)]
		if osfile.ReadFull(r.file.Load(), part, off) == nil {
			return len(part), nil
		}
		r.checked[chunk].Store(false) // somebody has cut the file short, or storage fails
	}
	whole := make([]byte, min(layer.IndexChunk, r.Size()-chunk*layer.IndexChunk))
	// Somebody else may have fetched the image again by now.
	if !r.right(chunk, whole) && (r.reopen() != nil || !r.right(chunk, whole)) {
		if err := r.of.fetchAgain(ctx, r.disk.Name, chunk); err != nil {
			return 0, err
		}
		if err := r.reopen(); err != nil {
			return 0, err
		}
		if !r.right(chunk, whole) {
			return 0, fmt.Errorf("other content was fetched than before for chunk %d", chunk)
		}
	}
	return copy(p, whole[off-chunk*layer.IndexChunk:]), nil
}

// right reads a chunk of the file, and reports whether it has the digest that it had.
func (r *rawChunks) right(chunk int64, p []byte) bool {
	f := r.file.Load()
	if f == nil || osfile.ReadFull(f, p, chunk*layer.IndexChunk) != nil ||
		r.chunks.Check(p, chunk*layer.IndexChunk) != nil {
		return false
	}
	r.checked[chunk].Store(true)
	return true
}
