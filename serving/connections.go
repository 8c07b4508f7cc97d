package serving

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/status"
)

// Connection is a front end's type for its connections, from accept to close. It embeds a Conn.
type Connection interface {
	comparable
	Base() *Conn
	// Serve runs the connection. At its end the front end calls Connections.Drop.
	Serve()
	// End closes the connection because of err, by Conn.Fail. Afterwards its client claims no disk,
	// and its requests that have not begun to change a disk never do.
	End(err error)
	// Look is called every Rules.Every, to notice that a peer does nothing or is gone.
	Look(now time.Time, scarce bool)
	// Session describes the connection. It returns false if it has no session.
	Session() (status.Session, bool)
}

// Rules are the rules for a front end's connections.
type Rules struct {
	Disks *Disks
	Log   *zap.Logger
	Crowd Crowd
	// Delay is the longest delay of a peer that fails again and again; 0 or less: there is none.
	Delay time.Duration
	// Every is the time between two looks at the connections. If Tick is not nil, it is called
	// before each look.
	Every time.Duration
	Tick  func(now time.Time)
	// Gated says that Disks.Refuse ends the connections. The front end then asks Disks.Refusal
	// before it gives a disk to a peer.
	Gated bool
}

// Connections are all connections of a front end. They are accepted at any number of portals,
// bounded by the Entrance, and known until Drop. The Penalties slow down peers that fail again and
// again. Any number of goroutines may call the methods.
type Connections[C Connection] struct {
	*Entrance
	*Penalties
	// Goroutines are those that serve connections, and others that Finish waits for.
	Goroutines sync.WaitGroup

	rules     Rules
	failures  *Seldom[failure]
	closed    chan struct{} // closed by Close
	over      chan struct{} // closed by Finish
	finish    sync.Once
	watch     sync.Once
	pushedOut atomic.Int64 // connections pushed out since the log last mentioned them

	mu      sync.Mutex
	closing bool                      // guarded by mu
	portals map[net.Listener]struct{} // guarded by mu
	all     map[C]struct{}            // guarded by mu
}

// failure identifies a failure in the log: where connections come from, and why they fail.
type failure struct{ source, reason string }

const (
	// failureTold is how long the log does not repeat a failure.
	failureTold = time.Minute
	// pushedOutTold is the same for connections that were pushed out.
	pushedOutTold = 10 * time.Second
)

// NewConnections makes the empty set of a front end.
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
// ErrClosed. It closes l. If there is no descriptor left, it pushes out a stranger (see Entrance),
// and new connections stay in the backlog meanwhile. An error that will not pass is returned.
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
		if !socket.Passes(err) {
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

// Take serves a connection, made by begin. After Close it closes the connection.
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

// look looks at the connections again and again, until Finish.
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

// Failed counts a failure of a connection from a source. If the source has failed often, the log
// mentions each reason once a minute: say reports whether to log it now, with the fields in more.
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

// Ending says whether the end of a connection counts against its peer.
type Ending int

const (
	Expected Ending = iota // the peer or an operator wanted it
	Failure                // because of what the peer has sent
	// Useless is the end of a connection that the peer has closed at once, without a request. The
	// peer does not like what it was offered, and may come back again and again.
	Useless
)

// atOnce is how soon a useless connection ends.
const atOnce = time.Second

// EndedSince returns Expected or Useless, for a connection that the peer has closed. used says that
// the connection was of some use to the peer.
func EndedSince(since time.Time, used bool) Ending {
	if used || time.Since(since) >= atOnce {
		return Expected
	}
	return Useless
}

// Ended counts the end of a connection against its peer, unless the end is Expected. It returns the
// level at which to log the end, and fields: the usual level, or a warning if the peer is at fault.
// If the peer comes back again and again, the warning comes once a minute for each reason.
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

// Close accepts no more connections. Existing ones go on.
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

// Drain accepts no more connections, reads nothing more from existing ones, and waits for requests
// under way, as Finish does.
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
// describes them. The peers may connect again. Requests end without an answer. A write under way
// may still reach the disk, and the disk stays claimed until it has.
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
