package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// rawDisk is a raw file of the cache that was made from an image. Like a chunk of the cache, each
// of its chunks is verified when this process first uses it. A wrong one is mended.
type rawDisk struct {
	of    *pulledDisk
	name  string
	want  *rawDigestsOf
	zeros layer.Zeros

	file    atomic.Pointer[os.File] // nil: it cannot be opened
	checked []atomic.Bool           // by chunk

	mu   sync.Mutex
	open []*os.File // guarded by mu; all that were in file
}

var _ image.Source = (*rawDisk)(nil)

func newRawDisk(d *pulledDisk, name string) (*rawDisk, error) {
	want := d.digests.find(name)
	if want == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	zeros, err := layer.NewZeros(want.Size, layer.IndexChunk,
		io.NewSectionReader(want.chunks, 0, want.chunks.Size()))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	r := &rawDisk{of: d, name: name, want: want, zeros: zeros,
		checked: make([]atomic.Bool, want.chunks.Size()/layer.DigestSize)}
	_ = r.reopen() // if that fails, its first read mends it
	return r, nil
}

func (r *rawDisk) path() string { return path.Join(r.of.dir, r.name) }

// reopen opens the file that has the name now.
func (r *rawDisk) reopen() error {
	f, err := r.of.root.OpenFile(r.path(), os.O_RDONLY)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = append(r.open, f)
	r.file.Store(f)
	return nil
}

// info describes the file that is open; nil: none is.
func (r *rawDisk) info() fs.FileInfo {
	if f := r.file.Load(); f != nil {
		if info, err := f.Stat(); err == nil {
			return info
		}
	}
	return nil
}

func (r *rawDisk) Size() int64 { return r.want.Size }

func (r *rawDisk) Identity() image.Identity {
	return image.Identity{Digest: rawDigest(path.Base(r.of.dir), r.name)}
}

func (r *rawDisk) Parallel() int { return 1 }

// Extent goes by the digests: a hole that somebody has punched is not one.
func (r *rawDisk) Extent(off, length int64) (disk.Extent, error) {
	if off < 0 || off >= r.Size() {
		return disk.Extent{}, fmt.Errorf("an extent at %d of %d bytes", off, r.Size())
	}
	n, zero := r.zeros.Run(off, length)
	return disk.Extent{Length: n, Data: !zero}, nil
}

// WillRead asks the kernel to read ahead. If that fails, the file is read when it is needed.
func (r *rawDisk) WillRead(off, length int64) {
	if f := r.file.Load(); f != nil {
		_ = osfile.Call(f, func(fd int) error {
			return unix.Fadvise(fd, off, length, unix.FADV_WILLNEED)
		})
	}
}

func (r *rawDisk) Check() error { return nil }

func (r *rawDisk) Close() (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.open {
		err = errors.Join(err, f.Close())
	}
	r.open = nil
	return err
}

func (r *rawDisk) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 || off >= r.Size() {
		return 0, io.EOF
	}
	if off+int64(len(p)) > r.Size() {
		p, err = p[:r.Size()-off], io.EOF
	}
	for n < len(p) {
		at := off + int64(n)
		length, zero := r.zeros.Run(at, int64(len(p)-n))
		part := p[n : n+int(length)]
		if zero {
			clear(part)
			n += len(part)
			continue
		}
		got, err := r.readPart(ctx, part, at)
		if n += got; err != nil {
			return n, err
		}
	}
	return n, err
}

// readPart reads either the part of p that was verified before, or up to the end of a chunk.
func (r *rawDisk) readPart(ctx context.Context, p []byte, off int64) (int, error) {
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
	if !r.right(chunk, whole) {
		if err := r.of.mend.chunk(ctx, r, chunk, whole); err != nil {
			return 0, fmt.Errorf("%s: %w", r.path(), err)
		}
	}
	return copy(p, whole[off-chunk*layer.IndexChunk:]), nil
}

// right reads a chunk of the file, and reports whether it is what it was.
func (r *rawDisk) right(chunk int64, p []byte) bool {
	f := r.file.Load()
	if f == nil || osfile.ReadFull(f, p, chunk*layer.IndexChunk) != nil || !r.matches(chunk, p) {
		return false
	}
	r.checked[chunk].Store(true)
	return true
}

func (r *rawDisk) matches(chunk int64, p []byte) bool {
	return checkDigest(r.want.chunks, chunk, p) == nil
}

// mender brings wrong chunks of raw files again: by ranges if that is possible, or else with the
// whole image.
type mender struct {
	s    *Stream
	of   *pulledDisk
	life context.Context // of what is fetched for nobody in particular
	end  context.CancelFunc

	turn   chan struct{} // has one element; its holder may mend, and use what follows
	seek   *seekDisks
	sought bool
	again  chan error // gets the result of fetching the image again; nil: nobody fetches it
	last   time.Time  // when it was fetched again
	warned time.Time
}

const (
	// mendWarn is the least time between two lines of the log about wrong chunks.
	mendWarn = 5 * time.Second
	// mendAgain is the least time between two fetches of a whole image. If what was just fetched is
	// wrong, storage changes it.
	mendAgain = 10 * time.Minute
)

func newMender(s *Stream, of *pulledDisk) *mender {
	m := &mender{s: s, of: of, turn: make(chan struct{}, 1)}
	m.life, m.end = context.WithCancel(context.Background())
	m.turn <- struct{}{}
	return m
}

func (m *mender) close() error {
	m.end()
	<-m.turn
	if m.again != nil {
		<-m.again
	}
	if m.seek == nil {
		return nil
	}
	return m.seek.close()
}

// chunk fills p with the right content of a chunk that is wrong in its file. It waits until ctx
// ends.
func (m *mender) chunk(ctx context.Context, r *rawDisk, chunk int64, p []byte) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", disk.ErrNotNow, ctx.Err())
	}
	select {
	case <-m.turn:
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", disk.ErrNotNow, ctx.Err())
	}
	defer func() { m.turn <- struct{}{} }()
	// Somebody else may have mended it by now, in place or with another file.
	if r.right(chunk, p) || r.reopen() == nil && r.right(chunk, p) {
		return nil
	}
	m.s.opt.Cache.NoteDamaged()
	if time.Since(m.warned) > mendWarn {
		m.warned = time.Now()
		m.s.warnOf(r.name)(fmt.Sprintf("chunk %d of a fetched disk in the cache does not match "+
			"its digest, and is fetched again", chunk))
	}
	if one := m.byRanges(ctx, r.name); one != nil {
		_, err := one.ReadAt(ctx, p, chunk*layer.IndexChunk)
		if err == nil && !r.matches(chunk, p) {
			err = errors.New("other content was fetched")
		}
		if err == nil {
			r.repair(p, chunk*layer.IndexChunk)
			return nil
		}
		if errors.Is(err, disk.ErrNotNow) || ctx.Err() != nil {
			return fmt.Errorf("%w: %w", disk.ErrNotNow, err)
		}
	}
	for pause := transport.FirstPause; ; pause = min(2*pause, transport.LongPause) {
		err := m.whole(ctx, r)
		if err == nil {
			break
		}
		if ctx.Err() == nil {
			m.s.warnOf(r.name)(fmt.Sprintf("%v; a read waits, next try in %s", err, pause))
			err = errors.Join(err, transport.PauseFor(ctx, pause))
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %w", disk.ErrNotNow, err)
		}
	}
	if err := r.reopen(); err != nil {
		return err
	}
	if !r.right(chunk, p) {
		return fmt.Errorf("chunk %d does not match its digest although the image was fetched "+
			"again: check the storage of the cache directory", chunk)
	}
	return nil
}

// repair writes a chunk into the file. Where that is not possible, the chunk is mended whenever it
// is needed, from the cache.
func (r *rawDisk) repair(p []byte, off int64) {
	f, err := r.of.root.OpenFile(r.path(), os.O_RDWR)
	if err != nil {
		return
	}
	_, _ = f.WriteAt(p, off) // the next read checks it
	f.Close()
}

// byRanges is the disk as it can be read without its raw file. nil: it cannot.
func (m *mender) byRanges(ctx context.Context, name string) *seekDisk {
	if !m.sought {
		seek, err := m.s.openSeekDisks(ctx, m.of.root.Root, m.of.dir+seekSuffix)
		if ctx.Err() == nil && !errors.Is(err, disk.ErrNotNow) {
			m.sought = true
		}
		m.seek = seek
	}
	if m.seek == nil {
		return nil
	}
	return m.seek.disks[name]
}

// whole fetches the image again, and goes on with that if ctx ends.
func (m *mender) whole(ctx context.Context, r *rawDisk) error {
	if m.again == nil {
		if !m.last.IsZero() && time.Since(m.last) < mendAgain {
			return nil
		}
		again := make(chan error, 1)
		m.again = again
		was, name := r.info(), r.path()
		go func() {
			again <- m.s.pullAgain(m.life, m.of.root, m.of.dir, func() bool {
				now, err := m.of.root.Stat(name)
				return err == nil && was != nil && !os.SameFile(was, now)
			})
		}()
	}
	select {
	case err := <-m.again:
		if m.again = nil; err == nil {
			m.last = time.Now()
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
