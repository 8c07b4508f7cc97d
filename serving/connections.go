package serving

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/status"
)

// Connection is one of a front end's, from accept to close.
type Connection interface {
	comparable
	// Arrived is what the entrance knows of the connection.
	Arrived() *Arrival
	// Serve runs the connection. At its end the front end calls Connections.Drop.
	Serve()
}

// Connections are all connections of a front end. They are accepted at any number of portals,
// bounded by the Entrance, and known until they are dropped. Peers that fail again and again are
// slowed down by the Penalties. Any number of goroutines may call the methods.
type Connections[C Connection] struct {
	*Entrance
	*Penalties
	// Goroutines are those that serve connections, and others that Wait has to wait for.
	Goroutines sync.WaitGroup

	failures *Seldom[failure]
	closed   chan struct{} // closed by Close

	mu      sync.Mutex
	closing bool                      // guarded by mu
	portals map[net.Listener]struct{} // guarded by mu
	all     map[C]struct{}            // guarded by mu
}

// failure is why connections from a source fail.
type failure struct{ source, reason string }

// failureTold is how long the log stays quiet about a failure that repeats.
const failureTold = time.Minute

// NewConnections is for a front end without a connection. Delay is the longest delay of a peer that
// fails again and again; 0 or less: there is none.
func NewConnections[C Connection](crowd Crowd, delay time.Duration) *Connections[C] {
	return &Connections[C]{Entrance: NewEntrance(crowd), Penalties: NewPenalties(delay),
		failures: NewSeldom[failure](failureTold), closed: make(chan struct{}),
		portals: map[net.Listener]struct{}{}, all: map[C]struct{}{}}
}

// Accept serves the connections that come at l, each made by begin, until Close, and then returns
// nil. It closes l. If there is no descriptor left, a connection whose peer has not introduced
// itself gives up its own, and new ones stay in the backlog meanwhile. Warn is called after the
// first of several such failures in a row. An error that will not pass is returned.
func (cs *Connections[C]) Accept(l net.Listener, begin func(net.Conn) C, warn func(error)) error {
	defer l.Close()
	cs.mu.Lock()
	if cs.closing {
		cs.mu.Unlock()
		return nil
	}
	cs.portals[l] = struct{}{}
	cs.mu.Unlock()
	defer func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		delete(cs.portals, l)
	}()
	for failed := 0; ; failed++ {
		nc, err := l.Accept()
		if err == nil {
			failed = -1
			cs.Take(nc, begin)
			continue
		}
		if cs.Closing() {
			return nil
		}
		if !passing(err) {
			return err
		}
		if failed == 0 {
			warn(err)
		}
		pause := acceptPauses[min(failed, len(acceptPauses)-1)]
		if cs.MakeRoom() {
			pause = acceptPauses[0]
		}
		select {
		case <-cs.closed:
		case <-time.After(pause):
		}
	}
}

// Take serves a connection, made by begin. After Close it closes it.
func (cs *Connections[C]) Take(nc net.Conn, begin func(net.Conn) C) {
	c := begin(nc)
	cs.mu.Lock()
	if cs.closing {
		cs.mu.Unlock()
		_ = nc.Close()
		return
	}
	cs.all[c] = struct{}{}
	cs.Goroutines.Add(1)
	cs.mu.Unlock()
	cs.Arrive(c.Arrived())
	go func() {
		defer cs.Goroutines.Done()
		c.Serve()
	}()
}

// Go runs f in a goroutine of Goroutines. After Close it does nothing.
func (cs *Connections[C]) Go(f func()) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if !cs.closing {
		cs.Goroutines.Go(f)
	}
}

// Drop forgets a connection. It may be called more than once.
func (cs *Connections[C]) Drop(c C) {
	cs.Leave(c.Arrived())
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.all, c)
}

// All returns the connections for which which returns true. Which must not call back.
func (cs *Connections[C]) All(which func(C) bool) (all []C) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for c := range cs.all {
		if which(c) {
			all = append(all, c)
		}
	}
	return all
}

// Portals are the addresses at which connections are accepted.
func (cs *Connections[C]) Portals() (all []net.Addr) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for l := range cs.portals {
		all = append(all, l.Addr())
	}
	return all
}

// Failed counts a failure of a connection from a source. Once the source has failed often, the log
// has each reason once a minute: say tells whether it is now, and more is for the line.
func (cs *Connections[C]) Failed(source, reason string) (more []zap.Field, say bool) {
	now := time.Now()
	if !cs.Penalties.Failed(source, now) {
		return nil, true
	}
	suppressed, say := cs.failures.Admit(failure{source, reason}, now)
	return Unsaid(suppressed), say
}

// Close lets no more connections come. Those that are there go on.
func (cs *Connections[C]) Close() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.closing {
		return
	}
	cs.closing = true
	close(cs.closed)
	for l := range cs.portals {
		_ = l.Close()
	}
}

// Closing reports whether Close was called.
func (cs *Connections[C]) Closing() bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.closing
}

// Wait waits until all Goroutines have ended. If ctx ends first, it returns its error.
func (cs *Connections[C]) Wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		cs.Goroutines.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Sessions describes those of all for which which returns true, the oldest one first, and calls
// each for them before.
func Sessions[S interface{ Session() status.Session }](all []S, which func(status.Session) bool,
	each func(S)) []status.Session {
	list := []status.Session{}
	for _, s := range all {
		if one := s.Session(); which(one) {
			each(s)
			list = append(list, one)
		}
	}
	slices.SortFunc(list, func(a, b status.Session) int { return a.Since.Compare(b.Since) })
	return list
}

// acceptPauses are the waits after one, two and more failures of accept in a row.
var acceptPauses = [...]time.Duration{5 * time.Millisecond, 20 * time.Millisecond,
	100 * time.Millisecond, 500 * time.Millisecond}

// passing reports whether an error of accept will pass: there are no descriptors or no memory, or
// the connection was gone before it was accepted (accept(2)).
func passing(err error) bool {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		var temporary interface{ Temporary() bool }
		return errors.As(err, &temporary) && temporary.Temporary()
	}
	switch errno {
	case syscall.EBADF, syscall.EINVAL, syscall.ENOTSOCK, syscall.EOPNOTSUPP, syscall.EFAULT:
		return false
	}
	return true
}
