package disktest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
)

// Op is a method of a disk.
type Op int

const (
	OpAny Op = iota // all of the others
	OpRead
	OpWrite
	OpFlush
	OpDiscard
	OpZero
	OpExtent

	ops // how many there are
)

var opNames = [ops]string{"any", "read", "write", "flush", "discard", "zero", "extent"}

func (o Op) String() string {
	if o >= 0 && o < ops {
		return opNames[o]
	}
	return fmt.Sprintf("Op(%d)", int(o))
}

// Rule is a fault for the calls that it matches. The zero value matches every call and does
// nothing.
type Rule struct {
	Op Op
	// Off and Length, in bytes, restrict the rule to calls that touch the range. Length 0 is the
	// whole disk. A flush matches only a rule for the whole disk.
	Off, Length int64
	Times       int // the rule applies to this many calls; 0: to all that follow

	Err   error           // the call returns it
	Delay time.Duration   // the call waits first
	Block <-chan struct{} // the call waits until the channel is closed
}

// Fault is a disk that fails or delays chosen calls of another one. Each call is checked against
// every rule: all delays apply, and the first error. It has every optional interface. If the inner
// disk lacks one, the call returns errors.ErrUnsupported.
type Fault struct {
	inner disk.Disk

	mu    sync.Mutex
	rules []*liveRule // guarded by mu
	calls [ops]int    // guarded by mu
}

type liveRule struct {
	Rule
	seen int // matching calls so far
}

var (
	_ disk.Disk      = (*Fault)(nil)
	_ disk.Discarder = (*Fault)(nil)
	_ disk.Zeroer    = (*Fault)(nil)
	_ disk.Extenter  = (*Fault)(nil)
)

// NewFault wraps a disk, without any fault yet.
func NewFault(inner disk.Disk) *Fault { return &Fault{inner: inner} }

// Inject adds a rule. The function that it returns removes it again.
func (f *Fault) Inject(r Rule) (remove func()) {
	live := &liveRule{Rule: r}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, live)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for i, other := range f.rules {
			if other == live {
				f.rules = append(f.rules[:i:i], f.rules[i+1:]...)
				return
			}
		}
	}
}

// Calls returns how often the method was called so far. Calls that failed or still wait count, too.
func (f *Fault) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if op < 0 || op >= ops {
		return 0
	}
	return f.calls[op]
}

// before counts a call and waits as the rules say. It returns the rule that makes the call fail, or
// nil.
func (f *Fault) before(op Op, off, length int64) *Rule {
	f.mu.Lock()
	f.calls[op]++
	f.calls[OpAny]++
	var hit []Rule
	for _, r := range f.rules {
		if !r.matches(op, off, length) {
			continue
		}
		r.seen++
		if r.Times == 0 || r.seen <= r.Times {
			hit = append(hit, r.Rule)
		}
	}
	f.mu.Unlock()
	var failing *Rule
	for i := range hit {
		time.Sleep(hit[i].Delay)
		if hit[i].Block != nil {
			<-hit[i].Block
		}
		if failing == nil && hit[i].Err != nil {
			failing = &hit[i]
		}
	}
	return failing
}

func (r *Rule) matches(op Op, off, length int64) bool {
	if r.Op != OpAny && r.Op != op {
		return false
	}
	return r.Length == 0 || op != OpFlush && off < r.Off+r.Length && r.Off < off+length
}

func (f *Fault) Size() int64  { return f.inner.Size() }
func (f *Fault) Close() error { return f.inner.Close() }

func (f *Fault) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return f.transfer(ctx, OpRead, p, off, f.inner.ReadAt)
}

func (f *Fault) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	return f.transfer(ctx, OpWrite, p, off, f.inner.WriteAt)
}

func (f *Fault) transfer(ctx context.Context, op Op, p []byte, off int64,
	call func(context.Context, []byte, int64) (int, error)) (int, error) {
	if r := f.before(op, off, int64(len(p))); r != nil {
		return 0, r.Err
	}
	return call(ctx, p, off)
}

func (f *Fault) Flush() error {
	if r := f.before(OpFlush, 0, 0); r != nil {
		return r.Err
	}
	return f.inner.Flush()
}

func (f *Fault) Discard(ctx context.Context, off, length int64) error {
	if r := f.before(OpDiscard, off, length); r != nil {
		return r.Err
	}
	if d, ok := f.inner.(disk.Discarder); ok {
		return d.Discard(ctx, off, length)
	}
	return errors.ErrUnsupported
}

func (f *Fault) Zero(ctx context.Context, off, length int64) error {
	if r := f.before(OpZero, off, length); r != nil {
		return r.Err
	}
	if z, ok := f.inner.(disk.Zeroer); ok {
		return z.Zero(ctx, off, length)
	}
	return errors.ErrUnsupported
}

func (f *Fault) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	if r := f.before(OpExtent, off, length); r != nil {
		return disk.Extent{}, r.Err
	}
	if e, ok := f.inner.(disk.Extenter); ok {
		return e.Extent(ctx, off, length)
	}
	return disk.Extent{}, errors.ErrUnsupported
}
