package sourcetest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// Options of a source. The zero value works.
type Options struct {
	Digest   string        // of the content; "": unknown
	Parallel int           // 0: 8
	Delay    time.Duration // of each read
	// AtHand reports what can be read without delay, also while the source is out of reach. nil:
	// nothing.
	AtHand func(off, length int64) bool
}

// Far is a source that lies far away. Any number of goroutines may use it.
type Far struct {
	content *bytes.Reader
	opt     Options

	mu    sync.Mutex
	reach chan struct{} // guarded by mu; closed while the source can be reached
	ended error         // guarded by mu; not nil: it can never be reached again
	lost  [][2]int64    // guarded by mu; begin and end of ranges that can never be read again
	stats Stats         // guarded by mu
	now   int           // guarded by mu; reads under way
}

// Stats counts the calls of a source.
type Stats struct {
	Reads  int   // begun
	Most   int   // most reads under way at the same time
	Bytes  int64 // returned
	Closed int   // calls of Close
}

var _ image.Source = (*Far)(nil)

// New makes a source that can be reached.
func New(content []byte, opt Options) *Far {
	opt.Parallel = cmp.Or(opt.Parallel, 8)
	reach := make(chan struct{})
	close(reach)
	return &Far{content: bytes.NewReader(content), opt: opt, reach: reach}
}

// Cut makes the source unreachable: reads wait.
func (f *Far) Cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reach = make(chan struct{})
}

// Mend makes the source reachable again after Cut.
func (f *Far) Mend() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.reach)
}

// End makes every read fail from now on, also those that wait.
func (f *Far) End(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = err
	select {
	case <-f.reach:
	default:
		close(f.reach)
	}
}

// Lose makes a range unreadable for good.
func (f *Far) Lose(off, length int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = append(f.lost, [2]int64{off, off + length})
}

// Stats returns the calls so far.
func (f *Far) Stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stats
}

// Waiting returns how many reads are under way.
func (f *Far) Waiting() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}

// ReadAt implements image.Source.
func (f *Far) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	reach := f.begin()
	n, err := 0, error(nil)
	if f.opt.AtHand == nil || !f.opt.AtHand(off, int64(len(p))) {
		err = f.wait(ctx, reach, off, off+int64(len(p)))
	}
	if err == nil {
		n, err = f.content.ReadAt(p, off)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now--
	f.stats.Bytes += int64(n)
	return n, err
}

func (f *Far) begin() (reach <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now++
	f.stats.Reads++
	f.stats.Most = max(f.stats.Most, f.now)
	return f.reach
}

func (f *Far) wait(ctx context.Context, reach <-chan struct{}, begin, end int64) error {
	late := fmt.Errorf("the source is out of reach: %w", disk.ErrNotNow)
	select {
	case <-time.After(f.opt.Delay):
	case <-ctx.Done():
		return late
	}
	select {
	case <-reach:
	case <-ctx.Done():
		return late
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, lost := range f.lost {
		if begin < lost[1] && lost[0] < end {
			return errors.New("it is not what its digest says")
		}
	}
	return f.ended
}

// Size implements image.Source.
func (f *Far) Size() int64 { return f.content.Size() }

// Identity implements image.Source.
func (f *Far) Identity() image.Identity { return image.Identity{Digest: f.opt.Digest} }

// Parallel implements image.Source.
func (f *Far) Parallel() int { return f.opt.Parallel }

// Extent implements image.Source: everything is data.
func (f *Far) Extent(_, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// WillRead implements image.Source, and does nothing.
func (f *Far) WillRead(int64, int64) {}

// Check implements image.Source: the content never changes.
func (f *Far) Check() error { return nil }

// Close implements image.Source.
func (f *Far) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stats.Closed++
	return nil
}
