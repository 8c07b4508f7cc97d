package disktest

import (
	"context"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/durable"
)

// Storage is a disk of this machine whose second half is in the page cache. Reads of the first half
// are told so, and wait until Arrive. Only the last block of 4 KiB there is read at once.
type Storage struct {
	*Memory
	// Asked is called by a read that is told to wait, before it is told; nil: nothing is.
	Asked func()
	// Then is called by a read that has waited; nil: nothing is.
	Then func()

	arrive  sync.Once
	arrives chan struct{}
	begun   atomic.Int32
	ended   atomic.Int32
}

// NewStorage makes a disk over inner.
func NewStorage(inner *Memory) *Storage {
	return &Storage{Memory: inner, arrives: make(chan struct{})}
}

// Arrive ends all waits. It may be called more than once.
func (s *Storage) Arrive() { s.arrive.Do(func() { close(s.arrives) }) }

// Waited is how many reads have waited or wait, and Waiting how many wait.
func (s *Storage) Waited() int  { return int(s.begun.Load()) }
func (s *Storage) Waiting() int { return s.Waited() - int(s.ended.Load()) }

func (s *Storage) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	half := s.Size() / 2
	if off < half {
		if ctx == disk.Cached {
			if s.Asked != nil {
				s.Asked()
			}
			return 0, disk.ErrNotNow
		}
		if off != half-4096 {
			s.begun.Add(1)
			<-s.arrives
			s.ended.Add(1)
		}
		if s.Then != nil {
			s.Then()
		}
	}
	return s.Memory.ReadAt(ctx, p, off)
}

// NewStore makes the store in which a logical unit keeps its state beside the disk. The first Save
// makes dir. With synced, state has reached storage when Save returns.
func NewStore(dir string, synced bool) *durable.Store { return durable.NewStore(dir, synced) }
