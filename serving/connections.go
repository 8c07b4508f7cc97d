package serving

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/status"
)

// Connection is a front end's type for its connections, from accept to close. It embeds a Conn.
type Connection interface {
	comparable
	Base() *Conn
	// Serve runs the connection. At its end the front end calls Connections.Drop.
	Serve()
	// End closes the connection because of err, by Conn.Fail. Its client claims no disk afterwards,
	// and requests that have not begun to change a disk never do.
	End(err error)
	// Look is called every Rules.Every: a peer may stand still, or be gone.
	Look(now time.Time, scarce bool)
	// Session describes the connection. It returns false if it has no session.
	Session() (status.Session, bool)
}

// Rules are those of a front end's connections.
type Rules struct {
	Disks *Disks
	Log   *zap.Logger
	Crowd Crowd
	// Delay is the longest delay of a peer that fails again and again; 0 or less: there is none.
	Delay time.Duration
	// Every is the time between two looks at the connections. Tick, if it is not nil, is called
	// before each.
	Every time.Duration
	Tick  func(now time.Time)
	// Gated says that Disks.Refuse ends the connections: the front end asks Disks.Refusal before
	// it gives a disk to a peer.
	Gated bool
}

// Connections are all connections of a front end. They are accepted at any number of portals,
// bounded by the Entrance, and known until they are dropped. Peers that fail again and again are
// slowed down by the Penalties. Any number of goroutines may call the methods.
type Connections[C Connection] struct {
	*Entrance
	*Penalties
	// Goroutines are those that serve connections, and others that Wait has to wait for.
	Goroutines sync.WaitGroup

	rules     Rules
	failures  *Seldom[failure]
	closed    chan struct{} // closed by Close
	over      chan struct{} // closed by Finish
	finish    sync.Once
	watch     sync.Once
	pushedOut atomic.Int64 // connections since the last line of the log about them

	mu      sync.Mutex
	closing bool                      // guarded by mu
	portals map[net.Listener]struct{} // guarded by mu
	all     map[C]struct{}            // guarded by mu
}

// failure is why connections from a source fail.
type failure struct{ source, reason string }

const (
	// failureTold is how long the log stays quiet about a failure that repeats.
	failureTold = time.Minute
	// pushedOutTold is the same for connections that had to make room.
	pushedOutTold = 10 * time.Second
)

// NewConnections makes the set for a front end, without a connection.
func NewConnections[C Connection](r Rules) *Connections[C] {
	cs := &Connections[C]{Entrance: NewEntrance(r.Crowd), Penalties: NewPenalties(r.Delay),
		rules: r, failures: NewSeldom[failure](failureTold), closed: make(chan struct{}),
		over: make(chan struct{}), portals: map[net.Listener]struct{}{}, all: map[C]struct{}{}}
	if r.Gated {
		r.Disks.gate.add(cs.endAll)
	}
	return cs
}

// Accept serves the connections that come at l, each made by begin, until Close, and then returns
// ErrClosed. It closes l. If there is no descriptor left, a connection whose peer has not
// introduced itself gives up its own, and new ones stay in the backlog meanwhile. An error that
// will not pass is returned.
func (cs *Connections[C]) Accept(l net.Listener, begin func(net.Conn) C) error {
	defer l.Close()
	cs.mu.Lock()
	if cs.closing {
		cs.mu.Unlock()
		return ErrClosed
	}
	cs.portals[l] = struct{}{}
	cs.mu.Unlock()
	defer func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		delete(cs.portals, l)
	}()
	cs.watch.Do(func() { go cs.look() })
	for failed := 0; ; failed++ {
		nc, err := l.Accept()
		if err == nil {
			failed = -1
			cs.Take(nc, begin)
			continue
		}
		if cs.Closing() {
			return ErrClosed
		}
		if !temporary(err) {
			return fmt.Errorf("portal %s: %w", l.Addr(), err)
		}
		if failed == 0 {
			cs.rules.Log.Warn("cannot accept a connection, trying again",
				zap.String("portal", l.Addr().String()), zap.Error(err))
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
	b := c.Base()
	b.PushOut = func() {
		cs.pushedOut.Add(1)
		c.End(ErrPushedOut)
	}
	cs.mu.Lock()
	if cs.closing {
		cs.mu.Unlock()
		_ = nc.Close()
		return
	}
	cs.all[c] = struct{}{}
	cs.Goroutines.Add(1)
	cs.mu.Unlock()
	cs.Arrive(&b.Arrival)
	b.Add()
	go func() {
		defer cs.Goroutines.Done()
		defer b.AwaitRequests()
		defer b.Done()
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
	cs.Leave(&c.Base().Arrival)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.all, c)
}

// All returns the connections for which which returns true. which must not call methods of cs.
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

func (cs *Connections[C]) every() []C { return cs.All(func(C) bool { return true }) }

// endAll ends every connection because of err.
func (cs *Connections[C]) endAll(err error) {
	for _, c := range cs.every() {
		c.End(err)
	}
}

// look watches the connections until Finish.
func (cs *Connections[C]) look() {
	tick := time.NewTicker(cs.rules.Every)
	defer tick.Stop()
	for told := time.Now(); ; {
		select {
		case <-cs.over:
			return
		case now := <-tick.C:
			cs.LookNow(now)
			if now.Sub(told) < pushedOutTold {
				continue
			}
			told = now
			if n := cs.pushedOut.Swap(0); n > 0 {
				cs.rules.Log.Warn("connections whose peers had not introduced themselves were "+
					"closed to make room for new ones", zap.Int64("count", n),
					zap.Int("limit", cs.limits.Strangers))
			}
		}
	}
}

// LookNow looks at all connections once.
func (cs *Connections[C]) LookNow(now time.Time) {
	if cs.rules.Tick != nil {
		cs.rules.Tick(now)
	}
	scarce := cs.rules.Disks.Memory.Scarce()
	for _, c := range cs.every() {
		c.Look(now, scarce)
	}
}

// AwaitPenalty delays a connection whose source has failed several times.
func (cs *Connections[C]) AwaitPenalty(c *Conn) error {
	var delay time.Duration
	if delay, c.Slowed = cs.Delay(c.Source, time.Now()); delay == 0 {
		return nil
	}
	cs.rules.Log.Debug("a connection is held up: its peer has failed several times",
		zap.String("remote", c.Remote()), zap.Duration("delay", delay))
	select {
	case <-time.After(delay):
		return nil
	case <-c.gone:
		return net.ErrClosed
	case <-c.stopped:
		return ErrClosed
	}
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
// mentions each reason once a minute: say tells whether to log it now, with the fields in more.
func (cs *Connections[C]) Failed(source, reason string) (more []zap.Field, say bool) {
	more, _, say = cs.failed(source, reason)
	return more, say
}

func (cs *Connections[C]) failed(source, reason string) (more []zap.Field, slowed, say bool) {
	now := time.Now()
	if !cs.Penalties.Failed(source, now) {
		return nil, false, true
	}
	suppressed, say := cs.failures.Admit(failure{source, reason}, now)
	return Unsaid(suppressed), true, say
}

// Ending is how a connection has ended.
type Ending int

const (
	Expected Ending = iota // the peer or an operator wanted it
	Failure                // because of what the peer has sent
	// Useless is the end of a connection that the peer has closed at once, without a request: the
	// peer does not like what it gets, and may come back only to get the same.
	Useless
)

// atOnce is how soon a useless connection ends.
const atOnce = time.Second

// EndedSince tells an expected end from a useless one, of a connection that the peer has closed.
// used says that the connection was of some use to it.
func EndedSince(since time.Time, used bool) Ending {
	if used || time.Since(since) >= atOnce {
		return Expected
	}
	return Useless
}

// Ended counts the end of a connection against its peer, unless it is an expected one. It returns
// the level at which to log it, and fields for that line: the usual level, or a warning if the peer
// is at fault; once a minute for each reason if it comes back again and again.
func (cs *Connections[C]) Ended(c *Conn, how Ending, reason string, usual zapcore.Level) (
	level zapcore.Level, more []zap.Field) {
	if how == Expected {
		if c.Slowed {
			usual = zap.DebugLevel
		}
		return usual, nil
	}
	more, slowed, say := cs.failed(c.Source, reason)
	switch {
	case !say:
		return zap.DebugLevel, more
	case how == Useless && !slowed:
		return usual, more
	}
	return zap.WarnLevel, more
}

// Close accepts no more connections. Those that are there go on.
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

// Drain accepts no more connections, reads nothing more from those that are there, and waits for
// what is under way, as Finish does.
func (cs *Connections[C]) Drain(ctx context.Context) error {
	cs.Close()
	for _, c := range cs.every() {
		c.Base().Stop()
	}
	return cs.Finish(ctx)
}

// Finish waits until all Goroutines have ended. If ctx ends first, because a disk hangs or a peer
// does not take its answers, it ends all connections, and returns the error of ctx.
func (cs *Connections[C]) Finish(ctx context.Context) error {
	defer cs.finish.Do(func() { close(cs.over) })
	done := make(chan struct{})
	go func() {
		cs.Goroutines.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		cs.endAll(ErrClosed)
		return ctx.Err()
	}
}

// Sessions describes the connections with a session, the oldest one first.
func (cs *Connections[C]) Sessions() []status.Session {
	return cs.sessions(func(status.Session) bool { return true }, func(C) {})
}

// Kick ends the sessions for which which returns true, at once and without asking their peers, and
// describes them. The peers may connect again. Requests end without an answer; a write that is
// under way may still reach the disk, and the disk stays claimed until it has.
func (cs *Connections[C]) Kick(which func(status.Session) bool) []status.Session {
	return cs.sessions(which, func(c C) { c.End(ErrKicked) })
}

func (cs *Connections[C]) sessions(which func(status.Session) bool, each func(C)) []status.Session {
	list := []status.Session{}
	waits := cs.rules.Disks.waitingFor()
	for _, c := range cs.every() {
		if one, ok := c.Session(); ok && which(one) {
			if w := waits[c.Base().client.Load()]; w.n > 0 {
				one.Waiting, one.WaitingSince = max(one.Waiting, w.n), &w.oldest
				one.InFlight, one.WaitsFor = max(one.InFlight, one.Waiting), w.what
			}
			each(c)
			list = append(list, one)
		}
	}
	slices.SortFunc(list, func(a, b status.Session) int { return a.Since.Compare(b.Since) })
	return list
}

// acceptPauses are the waits after one, two and more failures of accept in a row.
var acceptPauses = [...]time.Duration{5 * time.Millisecond, 20 * time.Millisecond,
	100 * time.Millisecond, 500 * time.Millisecond}

// temporary reports whether an error of accept will pass: there are no descriptors or no memory, or
// the connection was gone before it was accepted (accept(2)).
func temporary(err error) bool {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		var t interface{ Temporary() bool }
		return errors.As(err, &t) && t.Temporary()
	}
	switch errno {
	case syscall.EBADF, syscall.EINVAL, syscall.ENOTSOCK, syscall.EOPNOTSUPP, syscall.EFAULT:
		return false
	}
	return true
}
