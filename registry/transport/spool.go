package transport

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/internal/osfile"
)

// spool is a blob that is fetched once, as a whole, because a registry sends everything where a
// part was asked for. Reads wait until it has come as far as they need. Its file has no name, so
// nothing is left of it.
type spool struct {
	from *repository
	desc v1.Descriptor
	file *os.File
	life context.Context
	end  context.CancelFunc
	// begun is how often the blob has got a spool, this one included.
	begun int

	mu      sync.Mutex
	changed chan struct{} // guarded by mu; closed when one of those below changes
	at      int64         // guarded by mu; the bytes that are here
	running bool          // guarded by mu
	err     error         // guarded by mu; why it has ended before the end
	sender  *endpoint     // guarded by mu; of the last bytes
	gone    bool          // guarded by mu; parts are asked for again
	hash    hash.Hash     // of the bytes that are here; belongs to who fetches
}

const (
	// maxSpools is how often a blob is fetched as a whole, if it has another digest each time.
	maxSpools = 3
	// spoolPart is how much is written at once, in bytes.
	spoolPart = 256 << 10
	// spoolRoom is which part of the file system a spool leaves to others: they may be guests.
	spoolRoom = 8
)

// errAskAgain makes a read ask for its part again.
var errAskAgain = errors.New("ask again")

// spoolOf is the spool of a blob; nil: it has none.
func (r *repository) spoolOf(desc v1.Descriptor) *spool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.spools[desc.Digest.String()]; s != nil && !s.isGone() {
		return s
	}
	return nil
}

// spoolFrom makes a spool of an answer that has the whole blob, unless there is one already. nil:
// there is none, and the answer is still the caller's.
func (r *repository) spoolFrom(f *fetch, whole *looseBody) *spool {
	s, told := r.newSpool(f, whole)
	e := f.endpoints[0]
	if told != "" {
		e.client.opt.Warn(fmt.Sprintf("%s sends all of the blob %s where a part is asked for%s",
			e.repo.RegistryStr(), f.desc.Digest, told))
	}
	return s
}

func (r *repository) newSpool(f *fetch, whole *looseBody) (_ *spool, told string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	digest := f.desc.Digest.String()
	old := r.spools[digest]
	if old != nil && !old.isGone() {
		_ = whole.Close()
		return old, ""
	}
	if r.closed || r.unspooled[digest] {
		return nil, ""
	}
	if r.spools == nil {
		r.spools, r.unspooled = make(map[string]*spool), make(map[string]bool)
	}
	file, err := r.spoolFile(f.desc.Size)
	if err != nil {
		r.unspooled[digest] = true
		return nil, fmt.Sprintf(", and it cannot be kept: %v; each read fetches all before it", err)
	}
	s := &spool{from: r, desc: f.desc, file: file, changed: make(chan struct{}), begun: 1,
		hash: sha256.New(), sender: f.endpoints[0]}
	s.life, s.end = context.WithCancel(context.Background())
	if !whole.keep(s.life) { // its reader has given up
		s.drop()
		return nil, ""
	}
	if old != nil {
		s.begun += old.begun
	}
	r.spools[digest] = s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.startLocked(whole, f.endpoints)
	return s, fmt.Sprintf(": it is fetched once, all %d MiB, and reads wait until it has come as "+
		"far as they need", f.desc.Size>>20)
}

// spoolFile makes a file without a name, if there is room for so many bytes.
func (r *repository) spoolFile(size int64) (*os.File, error) {
	room, err := osfile.AvailableSpace(r.spoolDir)
	if err != nil {
		return nil, err
	}
	if room-room/spoolRoom < size {
		return nil, fmt.Errorf("%q has room for %d MiB, and it has %d MiB", r.spoolDir, room>>20,
			size>>20)
	}
	return osfile.Nameless(r.spoolDir)
}

// endSpools ends all spools.
func (r *repository) endSpools() {
	r.mu.Lock()
	r.closed = true
	all := r.spools
	r.spools = nil
	r.mu.Unlock()
	for _, s := range all {
		s.drop()
	}
	r.work.Wait()
}

// startLocked begins to fetch, or goes on. The mutex of the repository is held, too. body is an
// answer that brings the whole blob; nil: there is none yet.
func (s *spool) startLocked(body io.ReadCloser, from []*endpoint) {
	f := &fetch{ctx: s.life, desc: s.desc, from: s.from, endpoints: from, off: s.at,
		end: s.desc.Size, alone: true, body: body}
	if body != nil {
		f.turn()
	}
	s.running, s.err = true, nil
	s.from.work.Go(func() { s.fetch(f) })
}

// goOn begins again where the last try has ended.
func (s *spool) goOn() error {
	from, r := s.from.order(), s.from
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return os.ErrClosed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running && !s.gone {
		s.startLocked(nil, from)
	}
	return nil
}

// fetch brings the rest of the blob.
func (s *spool) fetch(f *fetch) {
	defer f.Close()
	p := make([]byte, spoolPart)
	for at, over := f.off, false; !over; {
		n, err := f.Read(p)
		s.hash.Write(p[:n])
		if _, err := s.file.WriteAt(p[:n], at); err != nil {
			s.unwritable(f, err)
			return
		}
		at += int64(n)
		if at == s.desc.Size && !s.right(f) {
			s.drop()
			return
		}
		s.mu.Lock()
		s.at, s.sender, s.err = at, f.endpoints[0], err
		over = s.gone || err != nil || at == s.desc.Size
		s.running = !over
		s.tellLocked()
		s.mu.Unlock()
	}
}

// right checks the digest of the whole. If that is wrong again and again, it is left to the reads
// to find out what is: much may be right.
func (s *spool) right(f *fetch) bool {
	got := DigestIn(s.hash)
	if got == s.desc.Digest.String() {
		return true
	}
	e := f.endpoints[0]
	e.client.opt.Warn(fmt.Sprintf("%s: %v", e.repo.RegistryStr(),
		&DigestError{Want: s.desc.Digest.String(), Got: got}))
	s.from.distrust(e)
	return s.begun >= maxSpools
}

// unwritable ends a spool whose file cannot be written. The blob gets no other one.
func (s *spool) unwritable(f *fetch, err error) {
	if !s.isGone() {
		s.from.mu.Lock()
		s.from.unspooled[s.desc.Digest.String()] = true
		s.from.mu.Unlock()
		f.endpoints[0].client.opt.Warn(fmt.Sprintf("the blob %s cannot be kept any longer: %v; "+
			"each read fetches all before it", s.desc.Digest, err))
	}
	s.drop()
}

// tellLocked wakes those who wait.
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
	_ = s.file.Close() // nothing of it is needed any more
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
	part bool // was asked for
}

func (r *spoolReader) Close() error { return nil }

// Read waits for at least one byte. It returns errAskAgain if the spool has ended.
func (r *spoolReader) Read(p []byte) (int, error) {
	for waited := false; ; waited = true {
		r.mu.Lock()
		here, gone, running, err, changed := r.at-r.off, r.gone, r.running, r.err, r.changed
		r.mu.Unlock()
		switch {
		case gone:
			return 0, errAskAgain
		case here > 0:
			n, err := r.file.ReadAt(p[:min(int64(len(p)), here)], r.off)
			if r.off += int64(n); !r.part && r.off == r.desc.Size {
				r.drop() // whoever reads all of a blob keeps what is needed of it
			}
			if n > 0 {
				return n, nil
			}
			if r.isGone() {
				err = errAskAgain
			}
			return 0, err
		case err != nil && waited:
			return 0, err
		case !running:
			if err := r.goOn(); err != nil {
				return 0, err
			}
			continue
		}
		select {
		case <-changed:
		case <-r.ctx.Done():
			return 0, context.Cause(r.ctx)
		}
	}
}

// looseBody is the body of an answer that ends with the context of its reader, until it is kept.
type looseBody struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
	stop   func() bool
}

// loose returns a context that ends with ctx, and what makes a body of an answer to a request with
// it.
func loose(ctx context.Context) (context.Context, *looseBody) {
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	return own, &looseBody{cancel: cancel,
		stop: context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })}
}

// keep makes the body end with another context. It reports false if it has ended already.
func (b *looseBody) keep(life context.Context) bool {
	if !b.stop() {
		return false
	}
	b.stop = context.AfterFunc(life, func() { b.cancel(context.Cause(life)) })
	return true
}

func (b *looseBody) Close() (err error) {
	if b.ReadCloser != nil {
		err = b.ReadCloser.Close()
	}
	b.stop()
	b.cancel(nil)
	return err
}
