package serving

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/memory"
)

// Config says what all front ends share. The zero value works.
type Config struct {
	// Memory limits the bytes that all front ends together hold for their peers, for data and open
	// requests. 0: DefaultMemory.
	Memory int64
	// HoldTimeout is how long a request that needs far content is held while none comes. Then the
	// peer is asked to try again. 0: 10 min.
	HoldTimeout time.Duration
	// LeastHoldTimeout takes the place of HoldTimeout for a client that has given up a held
	// request. Such a peer waits only for a limited time, and gives up the disk if its limit passes
	// again and again. 0: 25 s, because Linux waits for 30 s. It is never more than HoldTimeout.
	LeastHoldTimeout time.Duration

	Observer Observer    // nil: none
	Log      *zap.Logger // nil: no log
}

// DefaultMemory is the default of Config.Memory.
const DefaultMemory = 64 << 20

const (
	defaultHold      = 10 * time.Minute
	defaultLeastHold = 25 * time.Second
)

// Disks are the disks in use of one daemon. Any number of goroutines may call the methods.
type Disks struct {
	// Memory limits the bytes that all front ends together hold for their peers.
	Memory *memory.Pool
	// Observer gets the events of all front ends. Never nil.
	Observer Observer

	log             *zap.Logger
	hold, leastHold time.Duration
	// inUse has the disks for readers without the lock, ascending by number; never nil
	inUse atomic.Pointer[[]*Disk]

	watch watchdog
	gate  gate

	mu     sync.Mutex
	fronts []Front          // guarded by mu; set before the first disk
	disks  []*Disk          // guarded by mu; ascending by number
	peers  map[string]*Peer // guarded by mu; by name
	came   uint64           // guarded by mu; number of peers so far
	// guarded by mu; disks that are being added or removed, by number
	changing map[uint16]*Options
	leaving  []*Disk // guarded by mu; removed disks, at least those that are still used
}

// New makes an empty set of disks.
func New(c Config) *Disks {
	c.Log = cmp.Or(c.Log, zap.NewNop())
	if c.Observer == nil {
		c.Observer = nopObserver{}
	}
	s := &Disks{Memory: memory.New(cmp.Or[int64](c.Memory, DefaultMemory)), Observer: c.Observer,
		log: c.Log, hold: cmp.Or(c.HoldTimeout, defaultHold), peers: map[string]*Peer{},
		changing: map[uint16]*Options{}}
	s.leastHold = min(cmp.Or(c.LeastHoldTimeout, defaultLeastHold), s.hold)
	s.inUse.Store(&[]*Disk{})
	s.gate.told = NewSeldom[string](time.Minute)
	return s
}

// Serve adds a front end. It is an error after the first disk was added, because a front end must
// know every disk.
func (s *Disks) Serve(f Front) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.disks) > 0 {
		return errors.New("a front end comes after the first disk")
	}
	s.fronts = append(slices.Clone(s.fronts), f)
	return nil
}

// All returns the disks in use, ascending by number. The slice is read-only.
func (s *Disks) All() []*Disk { return *s.inUse.Load() }

// At returns the disk with a number, or nil.
func (s *Disks) At(number uint16) *Disk {
	all := s.All()
	i, ok := slices.BinarySearchFunc(all, number, func(d *Disk, n uint16) int {
		return cmp.Compare(d.Number, n)
	})
	if !ok {
		return nil
	}
	return all[i]
}

// use returns a disk for which Begin has succeeded.
func (s *Disks) use(number uint16) (*Disk, error) {
	if d := s.At(number); d != nil && d.Begin() {
		return d, nil
	}
	return nil, fmt.Errorf("there is no LUN %d", number)
}

func (s *Disks) setLocked(disks []*Disk) {
	s.disks = disks
	s.inUse.Store(&disks)
}

// Add adds a disk. Its number must be free, and no disk with its identity may be in use: peers
// would take the two for paths to one disk. Add may wait for the disk's store; nothing else waits
// meanwhile.
func (s *Disks) Add(opt Options) error {
	fronts, err := s.beginAdd(&opt) // before anything is done to the disk
	if err != nil {
		return err
	}
	d, err := newDisk(opt)
	if err == nil {
		err = s.take(d, fronts)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.changing, opt.Number)
	if err != nil {
		return fmt.Errorf("LUN %d: %w", opt.Number, err)
	}
	disks := append(slices.Clone(s.disks), d)
	slices.SortFunc(disks, func(a, b *Disk) int { return cmp.Compare(a.Number, b.Number) })
	s.setLocked(disks)
	return nil
}

// take calls Front.Added of every front end.
func (s *Disks) take(d *Disk, fronts []Front) error {
	d.fronts = fronts
	for i, f := range fronts {
		if err := f.Added(d); err != nil {
			d.remove()
			d.cancel()
			for _, f := range fronts[:i] {
				f.Removed(d)
			}
			return err
		}
	}
	return nil
}

// beginAdd refuses a disk that cannot be added, and keeps it from being added twice at the same
// time. Front.Added may undo what an interrupted request has left half done. That must not happen
// to a disk that is in use already.
func (s *Disks) beginAdd(opt *Options) ([]Front, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	same := func(other uint16) error {
		return fmt.Errorf("LUN %d has the same identifier as LUN %d, %x: serve each disk once",
			opt.Number, other, opt.Identity.NAA)
	}
	for _, d := range s.disks {
		switch {
		case d.Number == opt.Number:
			return nil, takenError(opt.Number)
		case d.Identity.NAA == opt.Identity.NAA:
			return nil, same(d.Number)
		}
	}
	for number, other := range s.changing {
		switch {
		case number == opt.Number:
			return nil, takenError(opt.Number)
		case other.Identity.NAA == opt.Identity.NAA:
			return nil, same(number)
		}
	}
	s.pruneLocked()
	for _, old := range s.leaving {
		if old.Identity.NAA == opt.Identity.NAA {
			return nil, fmt.Errorf("LUN %d: the disk is still used by commands to LUN %d, which "+
				"was removed; wait until it is released", opt.Number, old.Number)
		}
	}
	s.changing[opt.Number] = opt
	return s.fronts, nil
}

func takenError(number uint16) error {
	return fmt.Errorf("LUN %d is given to two disks; give each a number of its own", number)
}

// pruneLocked forgets removed disks that are released.
func (s *Disks) pruneLocked() {
	s.leaving = slices.DeleteFunc(s.leaving, func(d *Disk) bool {
		select {
		case <-d.idle:
			return true
		default:
			return false
		}
	})
}

// Remove removes a disk. New requests to it are refused, and requests under way end when they next
// use the disk. The number is free when Remove returns. The caller must not close, change or serve
// the disk again before released is closed, which may take long if a call hangs in the disk.
func (s *Disks) Remove(number uint16) (released <-chan struct{}, err error) {
	return s.removeIf(number, func(*Disk) error { return nil })
}

// InUseError says that a disk was not removed because peers use it.
type InUseError struct {
	LUN        uint16
	Initiators []string // the peers' names, in order
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("LUN %d is used by %s", e.LUN, strings.Join(e.Initiators, ", "))
}

// RemoveUnused is Remove, but returns an *InUseError if a client with a session has accessed the
// disk, or if a peer holds a right to it that bars others and lasts without a session. If a first
// request and RemoveUnused come at the same time, one of them wins: the request finds no disk, or
// the disk stays.
func (s *Disks) RemoveUnused(number uint16) (released <-chan struct{}, err error) {
	return s.removeIf(number, s.unusedLocked)
}

// CheckUnused returns the error with which RemoveUnused would refuse now.
func (s *Disks) CheckUnused(number uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.At(number); d != nil {
		return s.unusedLocked(d)
	}
	return nil
}

func (s *Disks) unusedLocked(d *Disk) error {
	users := make(map[string]struct{})
	for c := range d.clients {
		users[PlainName(c.peer.name)] = struct{}{}
	}
	for _, f := range s.fronts {
		for _, name := range f.Holders(d) {
			users[name] = struct{}{}
		}
	}
	if len(users) == 0 {
		return nil
	}
	return &InUseError{LUN: d.Number, Initiators: slices.Sorted(maps.Keys(users))}
}

// removeIf removes a disk unless may returns an error. may is called with mu held.
func (s *Disks) removeIf(number uint16, may func(*Disk) error) (<-chan struct{}, error) {
	d, fronts, err := s.beginRemove(number, may)
	if err != nil {
		return nil, err
	}
	for _, f := range fronts {
		f.Removed(d)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.changing, number)
	return d.idle, nil
}

func (s *Disks) beginRemove(number uint16, may func(*Disk) error) (*Disk, []Front, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.At(number)
	if d == nil {
		return nil, nil, fmt.Errorf("there is no LUN %d", number)
	}
	if err := may(d); err != nil {
		return nil, nil, err
	}
	s.setLocked(slices.DeleteFunc(slices.Clone(s.disks), func(o *Disk) bool { return o == d }))
	d.remove()
	d.cancel()
	d.clients = nil
	s.pruneLocked()
	s.leaving = append(s.leaving, d)
	s.changing[number] = &d.Options
	return d, s.fronts, nil
}

// Resize adopts the current size of a disk, which can only have grown. Front ends tell their peers.
func (s *Disks) Resize(number uint16) error {
	d, err := s.use(number)
	if err != nil {
		return err
	}
	defer d.End()
	d.resizing.Lock()
	defer d.resizing.Unlock()
	switch size, before := d.Disk.Size(), d.size.Load(); {
	case size%int64(d.BlockSize) != 0:
		return fmt.Errorf("LUN %d: disk size %d is not a multiple of %d", number, size, d.BlockSize)
	case size < before:
		return fmt.Errorf("LUN %d: the disk has become smaller, from %d to %d bytes, and a LUN "+
			"can only grow: remove it, and add it again", number, before, size)
	case size == before:
		return nil
	default:
		d.size.Store(size)
	}
	s.mu.Lock()
	fronts := s.fronts
	s.mu.Unlock()
	for _, f := range fronts {
		f.Resized(d)
	}
	return nil
}
