package registry

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync/atomic"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// oldFile is a file of an image that a new disk is compared with.
type oldFile struct {
	*farFile
	entry   *layer.IndexFile
	content *qcow2.Image // nil: the file is a raw disk
	isRaw   atomic.Bool  // it is certain that the file is raw
}

// localCopy is what this machine has of an old disk.
type localCopy struct {
	disk  *image.Image  // the new version of the disk
	file  *os.File      // possibly the same file as the old disk; nil: there is none
	cache *cache.Cache  // cache of fetched content
	dir   *flock.OwnDir // of the cache
}

// newLocalCopy opens a copy of the old disk's file. copyOf "": there is none. It closes the disk
// after an error.
func newLocalCopy(disk *image.Image, copyOf string) (_ *localCopy, err error) {
	h := &localCopy{disk: disk}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.close())
		}
	}()
	if h.dir, err = flock.TemporaryDir(); err != nil {
		return nil, err
	}
	if h.cache, err = cache.Open(h.dir.Path, cache.Options{}); err != nil || copyOf == "" {
		return h, err
	}
	h.file, err = osfile.OpenRegular(copyOf)
	return h, err
}

func (h *localCopy) close() error {
	err := h.disk.Close()
	if h.file != nil {
		err = errors.Join(err, h.file.Close())
	}
	if h.cache != nil {
		err = errors.Join(err, h.cache.Close())
	}
	return errors.Join(err, h.dir.Remove())
}

// open opens a file of an old image's index. Content that this machine has is not fetched: most of
// a raw disk is the same from one version to the next.
func (h *localCopy) open(blob *transport.Blob, x *layer.Index, f *layer.IndexFile) (
	*oldFile, error) {
	o := &oldFile{entry: f}
	near := func(ctx context.Context, p []byte, off int64) bool {
		switch {
		case h.file != nil:
			return osfile.ReadFull(h.file, p, off) == nil
		case o.isRaw.Load():
			return readDisk(ctx, h.disk, p, off) == nil
		}
		return false
	}
	var err error
	if o.farFile, err = newFarFile(h.cache, blob, x, f,
		farOptions{ends: true, near: near}); err != nil {
		return nil, err
	}
	o.tables = nil // the index is not trusted here
	return o, nil
}

// learn opens a qcow2 file, to find out where everything lies in it.
func (o *oldFile) learn(ctx context.Context) error {
	head := make([]byte, min(o.Size(), 4))
	_, err := o.ReadAt(ctx, head, 0)
	if err == nil && qcow2.IsQcow2(head) {
		o.content, err = qcow2.Open(ctx, o, o.Size(), qcow2.Options{})
	}
	o.isRaw.Store(err == nil && o.content == nil)
	return err
}

// readDisk fills p from a disk. Behind the disk's end it reads zeros.
func readDisk(ctx context.Context, from *image.Image, p []byte, off int64) error {
	n := int(max(0, min(int64(len(p)), from.Size()-off)))
	clear(p[n:])
	if n == 0 {
		return nil
	}
	got, err := from.ReadAt(ctx, p[:n], off)
	if got < n {
		return transport.UnexpectedEnd(err)
	}
	return nil
}

// booted are the blocks of the disk in the chunks that a guest reads first, in that order.
func (o *oldFile) booted(ctx context.Context) ([]int64, error) {
	turn := make(map[int64]int) // by chunk
	for _, run := range o.entry.Boot {
		for chunk := run[0]; chunk < run[0]+run[1]; chunk++ {
			if _, ok := turn[chunk]; !ok {
				turn[chunk] = len(turn)
			}
		}
	}
	blocks := make([][]int64, len(turn))
	add := func(chunk, off, length int64) {
		n, ok := turn[chunk]
		for b := off / BootBlock; ok && b*BootBlock < off+length; b++ {
			blocks[n] = append(blocks[n], b)
		}
	}
	if o.content == nil {
		for chunk := range turn {
			add(chunk, chunk*layer.IndexChunk, layer.IndexChunk)
		}
		return slices.Concat(blocks...), nil
	}
	err := o.content.Places(ctx, func(at qcow2.Place) bool {
		for c := at.Host / layer.IndexChunk; c*layer.IndexChunk < at.Host+at.Length; c++ {
			add(c, at.Guest, o.content.Info().ClusterSize)
		}
		return true
	})
	return slices.Concat(blocks...), err
}

// nameless makes a file in the directory for temporary files.
func nameless() (*os.File, error) { return osfile.Nameless(os.TempDir()) }
