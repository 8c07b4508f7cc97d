package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/registry/transport"
)

// proof finds out whose fault it is that a chunk of a file never matches its digest. If the layer
// as a whole has the digest in the manifest, the index (or table of contents) of the image
// contradicts it, and waiting is of no use. Otherwise the registry sends wrong bytes, and may send
// the right ones later.
type proof struct {
	// check fetches the chunk at off from a layer that it verifies as a whole. The error is
	// disk.ErrWrongContent if the chunk is wrong nevertheless.
	check func(ctx context.Context, off int64) error
	warn  func(text string)
	life  context.Context
	end   context.CancelFunc
	work  sync.WaitGroup

	mu      sync.Mutex
	done    chan struct{} // guarded by mu; closed when the check under way has ended; nil: none is
	last    time.Time     // guarded by mu; when the last one ended
	verdict error         // guarded by mu; nil: the index was not found wrong
}

const (
	// proofAfter is how often a chunk must be wrong, each time after several tries, before the
	// layer is fetched for that: mostly, the right bytes come soon.
	proofAfter = 3
	// proofPause is the least time between two checks.
	proofPause = time.Minute
)

func newProof(warn func(string), check func(ctx context.Context, off int64) error) *proof {
	p := &proof{check: check, warn: warn}
	p.life, p.end = context.WithCancel(context.Background())
	return p
}

// of begins a check after the chunk at off was wrong that often, unless there was one a moment ago.
// It returns the verdict, or else a channel that is closed when there is news; nil: there will be
// none.
func (p *proof) of(off int64, times int) (news <-chan struct{}, verdict error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.verdict != nil || p.done != nil || times < proofAfter ||
		!p.last.IsZero() && time.Since(p.last) < proofPause || p.life.Err() != nil {
		return p.done, p.verdict
	}
	done := make(chan struct{})
	p.done = done
	p.warn("its chunks have other digests than its index says: the layer is fetched, to see " +
		"which of them is wrong")
	p.work.Go(func() {
		err := p.check(p.life, off)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.done, p.last = nil, time.Now(); errors.Is(err, disk.ErrWrongContent) {
			p.verdict = err
		}
		close(done)
	})
	return done, nil
}

func (p *proof) close() {
	if p != nil {
		p.end()
		p.work.Wait()
	}
}

// contradicts is the verdict about a chunk that is wrong although its layer is right.
func contradicts(layer *transport.Blob, err error) error {
	return fmt.Errorf("%w: the index of the image describes other content than its layer %s has "+
		"(%w): push the image again", disk.ErrWrongContent, layer.Desc.Digest, err)
}

// proven is the same layer, but each read of it fetches and verifies all of it.
func proven(b *transport.Blob) *transport.Blob {
	return transport.NewBlob(b.Desc, func(ctx context.Context, off, length int64) io.ReadCloser {
		return &provenReader{ctx: ctx, of: b, off: off, length: length}
	})
}

type provenReader struct {
	ctx         context.Context
	of          *transport.Blob
	off, length int64
	content     io.Reader // nil: it was not fetched yet
}

func (r *provenReader) Read(p []byte) (int, error) {
	if r.content == nil {
		all := r.of.Verified(r.ctx)
		part := new(bytes.Buffer)
		_, err := io.CopyN(io.Discard, all, r.off)
		if err == nil {
			_, err = io.CopyN(part, all, r.length)
		}
		if err == nil {
			_, err = io.Copy(io.Discard, all)
		}
		if err = errors.Join(err, all.Close()); err != nil {
			return 0, err
		}
		r.content = part
	}
	return r.content.Read(p)
}

func (r *provenReader) Close() error { return nil }
