package transport

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// spool is a blob that is fetched once, as a whole, because a registry sends everything instead of
// a part. Reads wait until it has come as far as they need, and check it like parts. Its file has
// no name, so nothing is left of it.
type spool struct {
	from *repository
	desc v1.Descriptor
	file *os.File
	life context.Context
	end  context.CancelFunc

	mu      sync.Mutex
	changed chan struct{} // guarded by mu; closed when one of the fields below changes
	at      int64         // guarded by mu; bytes that have come
	err     error         // guarded by mu; why nothing more comes; nil: it is under way or complete
	sender  *endpoint     // guarded by mu; sender of the last bytes
	gone    bool          // guarded by mu; parts are asked for again
}

const (
	// spoolPart is how much is written at once, in bytes.
	spoolPart = 256 << 10
	// A spool leaves 1/spoolRoom of the free space to others, which may be guests.
	spoolRoom = 8
)

// errAskAgain makes a read request its part again.
var errAskAgain = errors.New("ask again")

// spoolOf is the spool of a blob; nil: there is none.
func (r *repository) spoolOf(desc v1.Descriptor) *spool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.spools[desc.Digest.String()]; s != nil && !s.isGone() {
		return s
	}
	return nil
}

// spoolFrom makes a spool of a blob of which an endpoint has sent everything, unless there is one.
// nil: it cannot be kept.
func (r *repository) spoolFrom(e *endpoint, desc v1.Descriptor) *spool {
	s, told := r.newSpool(desc)
	if told != "" {
		e.client.opt.Warn(fmt.Sprintf("%s sends all of the blob %s where a part is asked for%s",
			e.repo.RegistryStr(), desc.Digest, told))
	}
	return s
}

func (r *repository) newSpool(desc v1.Descriptor) (_ *spool, told string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	digest := desc.Digest.String()
	old, known := r.spools[digest]
	switch {
	case r.closed:
		return nil, ""
	case known && (old == nil || !old.isGone()):
		return old, ""
	}
	if r.spools == nil {
		r.spools = make(map[string]*spool)
	}
	file, err := r.spoolFile(desc.Size)
	if err != nil {
		r.spools[digest] = nil
		return nil, fmt.Sprintf(", and it cannot be kept: %v; each read fetches all before it", err)
	}
	s := &spool{from: r, desc: desc, file: file, changed: make(chan struct{})}
	s.life, s.end = context.WithCancel(context.Background())
	r.spools[digest] = s
	r.work.Go(s.fetch)
	return s, fmt.Sprintf(": it is fetched once, all %d MiB, and reads wait until it has come as "+
		"far as they need", desc.Size>>20)
}

// spoolFile makes a file without a name, if there is room for that many bytes. It allocates them at
// once if the file system can, so that the next spool does not count on the same room.
func (r *repository) spoolFile(size int64) (*os.File, error) {
	room, err := osfile.AvailableSpace(r.spoolDir)
	if err != nil {
		return nil, err
	}
	if room-room/spoolRoom < size {
		return nil, fmt.Errorf("%q has room for %d MiB, and it has %d MiB", r.spoolDir, room>>20,
			size>>20)
	}
	f, err := osfile.Nameless(r.spoolDir)
	if err == nil {
		_ = osfile.Call(f, func(fd int) error { return unix.Fallocate(fd, 0, 0, size) })
	}
	return f, err
}

func (r *repository) endSpools() {
	r.mu.Lock()
	r.closed = true
	for _, s := range r.spools {
		if s != nil {
			s.drop()
		}
	}
	r.mu.Unlock()
	r.work.Wait()
}

// fetch fetches the rest of the blob. It ends with the first permanent error. A later read begins
// again.
func (s *spool) fetch() {
	s.mu.Lock()
	f := &fetch{ctx: s.life, desc: s.desc, from: s.from, endpoints: s.from.order(), off: s.at,
		end: s.desc.Size, alone: true}
	s.mu.Unlock()
	defer f.Close()
	p := make([]byte, spoolPart)
	for at := f.off; at < s.desc.Size; {
		n, err := f.Read(p)
		if _, err := s.file.WriteAt(p[:n], at); err != nil {
			s.unwritable(f.endpoints[0].client, err)
			return
		}
		at += int64(n)
		s.mu.Lock()
		s.at, s.sender, s.err = at, f.endpoints[0], err
		s.tellLocked()
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// unwritable ends a spool whose file cannot be written. The blob gets no other spool.
func (s *spool) unwritable(c *Client, err error) {
	if !s.isGone() {
		s.from.mu.Lock()
		s.from.spools[s.desc.Digest.String()] = nil
		s.from.mu.Unlock()
		c.opt.Warn(fmt.Sprintf("the blob %s cannot be kept any longer: %v; each read fetches all "+
			"before it", s.desc.Digest, err))
	}
	s.drop()
}

// tellLocked wakes waiting readers.
func (s *spool) tellLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// drop ends the spool: parts are asked for again.
func (s *spool) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	s.gone = true
	s.end()
	_ = s.file.Close() // its content is not needed any more
	s.tellLocked()
}

func (s *spool) isGone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone
}

// spoolReader reads a spool from somewhere on.
type spoolReader struct {
	*spool
	ctx  context.Context
	off  int64
	part bool // only a part of the blob was requested
}

func (r *spoolReader) Close() error { return nil }

// Read waits for at least one byte. It returns errAskAgain if the spool has ended.
func (r *spoolReader) Read(p []byte) (int, error) {
	for waited := false; ; waited = true {
		r.mu.Lock()
		if r.err != nil && r.at <= r.off && !waited && !r.gone {
			r.err = nil
			r.from.work.Go(r.fetch)
		}
		here, gone, err, changed := r.at-r.off, r.gone, r.err, r.changed
		r.mu.Unlock()
		switch {
		case gone:
			return 0, errAskAgain
		case here > 0:
			n, err := r.file.ReadAt(p[:min(int64(len(p)), here)], r.off)
			if r.off += int64(n); !r.part && r.off == r.desc.Size {
				r.drop() // a reader of the whole blob keeps what it needs
			}
			if n > 0 {
				return n, nil
			}
			if r.isGone() {
				err = errAskAgain
			}
			return 0, err
		case err != nil:
			return 0, err
		}
		select {
		case <-changed:
		case <-r.ctx.Done():
			return 0, context.Cause(r.ctx)
		}
	}
}
