package upload

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// slots make sure that each volume has one upload at a time, and each upload one request. Any
// number of goroutines may use them.
type slots struct {
	mu     sync.Mutex
	closed bool             // guarded by mu
	all    map[string]*slot // guarded by mu; by the volume's name
	clock  uint64           // guarded by mu; counts pauses
	work   sync.WaitGroup   // requests
}

// slot is the slot of one volume.
type slot struct {
	// guarded by slots.mu
	running *transfer // nil: no request is under way
	paused  *session  // an upload of packed data that waits in memory; nil: none
	since   uint64    // when it was paused
}

// transfer is a request that has the slot of a volume.
type transfer struct {
	name  string
	id    string // "": the upload cannot be resumed, or is not known yet
	began time.Time
	brief bool // not a request; it ends soon

	from, received, total atomic.Int64
	ended                 chan struct{}

	mu      sync.Mutex
	cut     bool                     // no more data may be received
	over    bool                     // another request may have the connection
	control *http.ResponseController // nil: nothing is received
}

func newTransfer(name string) *transfer {
	return &transfer{name: name, began: time.Now(), ended: make(chan struct{})}
}

// take gives the slot of a volume to a request. It interrupts an earlier request of the same
// upload: the client has given that up, or it would not send another one. If a request of another
// upload has the slot, take returns that request, and ok is false.
func (s *slots) take(ctx context.Context, t *transfer, id string) (other *transfer, ok bool) {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return nil, false
		}
		one := s.all[t.name]
		if one == nil {
			one = &slot{}
			s.all[t.name] = one
		}
		other = one.running
		if other == nil {
			one.running = t
			s.work.Add(1)
			s.mu.Unlock()
			return nil, true
		}
		mine := id != "" && other.id == id
		s.mu.Unlock()
		switch {
		case mine:
			other.interrupt()
		case !other.brief:
			return other, false
		}
		select {
		case <-other.ended:
		case <-ctx.Done():
			return other, false
		}
	}
}

// name notes which upload a request belongs to, once that is known.
func (s *slots) name(t *transfer, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.id = id
}

// release frees the slot of a request. pause is the upload that waits for its next request, or nil.
func (s *slots) release(t *transfer, pause *session) {
	defer s.work.Done()
	t.close() // a late interrupt must not hit the next request of its connection
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.all[t.name]
	one.running = nil
	if pause != nil {
		s.clock++
		one.paused, one.since = pause, s.clock
	}
	s.tidyLocked(t.name, one)
	close(t.ended)
}

// pausedOf removes the paused upload from the request's slot.
func (s *slots) pausedOf(t *transfer) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.all[t.name]
	paused := one.paused
	one.paused = nil
	return paused
}

// forget removes a paused upload from the slot of a volume, unless a request has the slot.
func (s *slots) forget(name string) (paused *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if one := s.all[name]; one != nil && one.running == nil {
		paused = one.paused
		delete(s.all, name)
	}
	return paused
}

// tidyLocked forgets an empty slot.
func (s *slots) tidyLocked(name string, one *slot) {
	if one.running == nil && one.paused == nil {
		delete(s.all, name)
	}
}

// maxPaused is how many uploads of packed data may wait in memory for their next request.
const maxPaused = 8

// crowded returns the volume whose upload has waited longest, if too many wait.
func (s *slots) crowded() (name string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var oldest *slot
	n := 0
	for at, one := range s.all {
		if one.paused == nil || one.running != nil {
			continue
		}
		n++
		if oldest == nil || one.since < oldest.since {
			oldest, name = one, at
		}
	}
	return name, n > maxPaused
}

// close interrupts all requests and waits for them. Later requests get no slot.
func (s *slots) close() (paused []*session) {
	s.mu.Lock()
	s.closed = true
	for _, one := range s.all {
		if one.running != nil {
			one.running.interrupt()
		}
	}
	s.mu.Unlock()
	s.work.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.all {
		if one.paused != nil {
			paused = append(paused, one.paused)
		}
	}
	s.all = map[string]*slot{}
	return paused
}

// ended reports whether close was called.
func (s *slots) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// running returns the running transfers, by the names of the volumes.
func (s *slots) running() []*transfer {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*transfer
	for _, one := range s.all {
		if one.running != nil && !one.running.brief {
			all = append(all, one.running)
		}
	}
	slices.SortFunc(all, func(a, b *transfer) int { return strings.Compare(a.name, b.name) })
	return all
}

// interrupt cuts off the data of the request.
func (t *transfer) interrupt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cut = true
	if !t.over && t.control != nil {
		_ = t.control.SetReadDeadline(time.Now()) // without deadlines, its connection ends it
	}
}

// listen extends the time in which the client must send something. It fails after interrupt.
func (t *transfer) listen() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cut {
		return errCut
	}
	_ = t.control.SetReadDeadline(time.Now().Add(silence))
	return nil
}

// close is called when no more data is received. It reports whether the data was cut off.
func (t *transfer) close() (cut bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over = true; t.control != nil {
		_ = t.control.SetReadDeadline(time.Time{})
	}
	return t.cut
}

// silence is how long a client may send nothing.
const silence = time.Minute

// body is the content of a request. It returns errCut if the content ends too early.
type body struct {
	io.Reader
	of *transfer
}

func (b body) Read(p []byte) (int, error) {
	if err := b.of.listen(); err != nil {
		return 0, err
	}
	n, err := b.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = errCut
	}
	return n, err
}
