package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

const (
	// tries is how often a chunk with wrong content is fetched.
	tries = 3
	// othersTurn is how long to wait for another process that fetches the same chunk.
	othersTurn = 10 * time.Second
	// abandoned is how long a fetch goes on when no reader waits any more: a guest that gave up a
	// slow read tries again.
	abandoned = 30 * time.Second
	// firstLook and lastLook bound the time between two checks. It doubles each time.
	firstLook = 2 * time.Millisecond
	lastLook  = 100 * time.Millisecond
)

// call is the fetch of one chunk for all its readers.
type call struct {
	done    chan struct{} // closed when content and err are set
	content []byte
	err     error
	waiters int // guarded by Blob.mu; without any, the call ends after a while
	cancel  context.CancelFunc
}

// chunk returns the content of a chunk, from the directory or by a fetch. ahead says that no reader
// waits for it.
func (b *Blob) chunk(ctx context.Context, number int64, ahead bool) ([]byte, error) {
	b.mu.Lock()
	if content := b.recentlyLocked(number); content != nil {
		b.mu.Unlock()
		return content, nil
	}
	c := b.calls[number]
	if c == nil {
		life, cancel := context.WithCancel(b.cache.life)
		c = &call{done: make(chan struct{}), cancel: cancel}
		b.calls[number] = c
		b.cache.work.Go(func() {
			defer cancel()
			c.content, c.err = b.bring(life, number, ahead)
			b.mu.Lock()
			if b.calls[number] == c {
				delete(b.calls, number)
			}
			b.mu.Unlock()
			close(c.done)
		})
	}
	c.waiters++
	b.mu.Unlock()
	select {
	case <-c.done:
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c.waiters--
	select {
	case <-c.done:
		return c.content, c.err
	default:
	}
	if c.waiters == 0 {
		time.AfterFunc(abandoned, func() { b.abandon(number, c) })
	}
	return nil, ctx.Err()
}

// abandon ends a call without waiters.
func (b *Blob) abandon(number int64, c *call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.waiters > 0 {
		return
	}
	c.cancel()
	if b.calls[number] == c { // the next reader begins a new call
		delete(b.calls, number)
	}
}

// bring finds a chunk in the directory, or fetches and stores it.
func (b *Blob) bring(ctx context.Context, number int64, ahead bool) ([]byte, error) {
	p := make([]byte, b.length(number))
	seg, err := b.open(number)
	if err != nil {
		b.cache.warn("the cache cannot be used", err)
		if err := b.fetch(ctx, number, p, ahead); err != nil {
			return nil, err
		}
		b.cache.unsaved.Add(1)
		b.keepRecent(number, p)
		return p, nil
	}
	defer seg.release()
	i := number % (segmentSize / b.opt.ChunkSize)
	if b.find(seg, number, i, p) {
		return p, nil
	}
	unlock, found := b.await(ctx, seg, number, i, p)
	defer unlock()
	if found {
		return p, nil
	}
	if err := b.fetch(ctx, number, p, ahead); err != nil {
		return nil, err
	}
	if err := seg.store(i, p); err != nil {
		b.cache.warn("a chunk cannot be written to the cache", err)
		b.cache.unsaved.Add(1)
		b.keepRecent(number, p)
		return p, nil
	}
	seg.check(i)
	b.cache.stored(int64(len(p)))
	return p, nil
}

// find reads a chunk from the directory and checks it.
func (b *Blob) find(seg *segment, number, i int64, p []byte) bool {
	if !seg.load(i, p) {
		return false
	}
	if b.opt.Verify != nil && !seg.checked[i].Load() {
		if err := b.opt.Verify(number, p); unsure(err) {
			return false
		} else if err != nil {
			b.cache.damaged.Add(1)
			b.cache.log.Warn("a chunk of the cache does not match its digest, and is fetched again",
				zap.String("blob", b.opt.Digest), zap.Int64("chunk", number), zap.Error(err))
			if err := seg.forget(i); err != nil {
				b.cache.warn("a chunk of the cache cannot be removed", err)
			}
			return false
		}
	}
	seg.check(i)
	return true
}

// unsure reports whether an error of Verify says nothing about the content: its digests cannot be
// read or noted, because storage is full, or the reader has closed its files.
func unsure(err error) bool { return errors.As(err, new(*fs.PathError)) }

// await waits for another process that fetches the chunk, if there is one, and reports whether the
// chunk is in the directory then. If not, nobody else fetches it until unlock.
func (b *Blob) await(ctx context.Context, seg *segment, number, i int64, p []byte) (
	unlock func(), found bool) {
	begin := time.Now()
	for look := firstLook; ; look = min(2*look, lastLook) {
		unlock, err := lockRange(seg.file, sumsAt+i*sumSize, sumSize, unix.F_OFD_SETLK)
		switch {
		case err == nil:
			// It may have been stored since this process looked.
			return unlock, b.find(seg, number, i, p)
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			b.cache.warn("the cache cannot be locked", err)
			return func() {}, false
		case time.Since(begin) > othersTurn:
			// Fetching the chunk twice is better than waiting for a process that hangs.
			return func() {}, false
		}
		select {
		case <-time.After(look):
		case <-ctx.Done():
			return func() {}, false
		}
	}
}

// fetch fetches a chunk. If its content is wrong, it tries again.
func (b *Blob) fetch(ctx context.Context, number int64, p []byte, ahead bool) error {
	release, err := b.turns.slot(ctx, ahead)
	if err != nil {
		return err
	}
	defer release()
	if !ahead {
		b.turns.wanted.Add(1)
		defer b.turns.wanted.Add(-1)
	}
	for try := 1; ; try++ {
		if err := b.opt.Fetch(ctx, p, number*b.opt.ChunkSize); err != nil {
			return err
		}
		b.cache.fetched.Add(1)
		b.cache.fetchedBytes.Add(int64(len(p)))
		if b.opt.Verify == nil {
			return nil
		}
		err := b.opt.Verify(number, p)
		if err == nil || unsure(err) {
			return err
		}
		b.cache.wrong.Add(1)
		b.cache.log.Warn("wrong content was fetched, and is not served", zap.Int("try", try),
			zap.String("blob", b.opt.Digest), zap.Int64("chunk", number), zap.Error(err))
		if try == tries {
			return fmt.Errorf("chunk %d of blob %s was wrong %d times: %w", number, b.opt.Digest,
				tries, err)
		}
	}
}

// turns limits the fetches from one place.
type turns struct {
	slots    chan struct{} // one for each fetch under way
	prefetch chan struct{} // one for each fetch that no reader waits for
	wanted   atomic.Int64  // fetches under way that a reader waits for
}

func newTurns() *turns {
	return &turns{slots: make(chan struct{}, fetches), prefetch: make(chan struct{}, prefetches)}
}

// slot waits for the turn of a fetch.
func (t *turns) slot(ctx context.Context, ahead bool) (release func(), err error) {
	take := func(from chan struct{}) error {
		select {
		case from <- struct{}{}:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if ahead {
		if err := take(t.prefetch); err != nil {
			return nil, err
		}
	}
	if err = take(t.slots); err == nil {
		return func() {
			<-t.slots
			if ahead {
				<-t.prefetch
			}
		}, nil
	}
	if ahead {
		<-t.prefetch
	}
	return nil, err
}

// maxAhead is how many chunks of a blob may wait to be prefetched.
const maxAhead = 4096

// Prefetch announces that a range will be read soon. It does not wait, and drops requests if there
// are too many.
func (b *Blob) Prefetch(off, length int64) {
	end := min(off+length, b.opt.Size)
	b.mu.Lock()
	defer b.mu.Unlock()
	for chunk := off / b.opt.ChunkSize; chunk*b.opt.ChunkSize < end; chunk++ {
		if len(b.ahead) >= maxAhead {
			return
		}
		if b.calls[chunk] == nil && !b.Has(chunk*b.opt.ChunkSize, b.length(chunk)) {
			b.ahead = append(b.ahead, chunk)
		}
	}
	for b.workers < min(prefetches, len(b.ahead)) {
		b.workers++
		b.cache.work.Go(b.prefetch)
	}
}

// prefetch fetches the announced chunks until there are none left.
func (b *Blob) prefetch() {
	for {
		b.mu.Lock()
		if len(b.ahead) == 0 || b.cache.life.Err() != nil {
			b.workers--
			b.mu.Unlock()
			return
		}
		chunk := b.ahead[0]
		b.ahead = b.ahead[1:]
		b.mu.Unlock()
		if b.Has(chunk*b.opt.ChunkSize, b.length(chunk)) {
			continue
		}
		// A reader of the chunk will find out about errors.
		if _, err := b.chunk(b.cache.life, chunk, true); errors.Is(err, fs.ErrClosed) {
			b.mu.Lock()
			b.ahead = nil // the readers have ended
			b.mu.Unlock()
		}
	}
}
