package serving

import (
	"cmp"
	"container/list"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
)

// Crowd limits the connections at a front end. A field of 0 means the default.
type Crowd struct {
	// Sessions is the most sessions at once; default 1024.
	Sessions int
	// PerPeer is the most sessions of one peer; default 256.
	PerPeer int
	// Strangers is the most connections, in addition to the sessions, whose peer has not introduced
	// itself. One more pushes another one out. Default 256.
	Strangers int
}

// Default limits of a Crowd.
const (
	DefaultSessions = 1024
	DefaultPerPeer  = 256
	defaultStranger = 256
)

// ErrCrowded says that the limit of sessions is reached.
var ErrCrowded = errors.New("the limit of sessions is reached")

// ErrPeerCrowded says that one peer has reached its limit of sessions.
var ErrPeerCrowded = errors.New("the limit of sessions of one client is reached")

// Entrance bounds the connections of a front end. A new session is refused at the limit: existing
// ones stay. A stranger, a connection whose peer has not introduced itself, costs little. At their
// limit a new stranger pushes out another, so that a flood of strangers keeps nobody out. That one
// is from the source with the most strangers: the oldest that has not begun, or else the oldest.
//
// Any number of goroutines may call the methods. Arrival.PushOut is called without a lock.
type Entrance struct {
	limits Crowd

	mu        sync.Mutex
	strangers list.List      // guarded by mu; of *Arrival, oldest first
	from      map[string]int // guarded by mu; strangers by source
	sessions  int            // guarded by mu
	perPeer   map[string]int // guarded by mu; sessions by peer
}

// Arrival is a connection at an Entrance.
type Arrival struct {
	// Source is where the connection comes from, as SourceOf says.
	Source string
	// PushOut ends the connection, because it must make room for another one.
	PushOut func()
	// Began says that the peer has begun to introduce itself.
	Began atomic.Bool

	place   *list.Element // guarded by Entrance.mu; nil: not a stranger
	peer    string        // guarded by Entrance.mu; of its session
	session bool          // guarded by Entrance.mu
}

// NewEntrance makes an entrance without a connection.
func NewEntrance(limits Crowd) *Entrance {
	limits.Sessions = cmp.Or(limits.Sessions, DefaultSessions)
	limits.PerPeer = cmp.Or(limits.PerPeer, DefaultPerPeer)
	limits.Strangers = cmp.Or(limits.Strangers, defaultStranger)
	return &Entrance{limits: limits, from: map[string]int{}, perPeer: map[string]int{}}
}

// SourceOf returns the origin of a connection: an IPv4 address, or the 64-bit network of an IPv6
// address, because one host may have all addresses of such a network. Zero means no address.
func SourceOf(nc net.Conn) netip.Addr {
	a, ok := nc.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	addr := a.AddrPort().Addr().Unmap().WithZone("")
	if addr.Is6() {
		if network, err := addr.Prefix(64); err == nil {
			return network.Addr()
		}
	}
	return addr
}

// Arrive adds a new connection as a stranger.
func (e *Entrance) Arrive(a *Arrival) {
	e.mu.Lock()
	var victim *Arrival
	if e.strangers.Len() >= e.limits.Strangers {
		victim = e.victimLocked()
	}
	a.place = e.strangers.PushBack(a)
	e.from[a.Source]++
	e.mu.Unlock()
	if victim != nil {
		victim.PushOut()
	}
}

// MakeRoom pushes a stranger out, and reports whether there was one.
func (e *Entrance) MakeRoom() bool {
	e.mu.Lock()
	victim := e.victimLocked()
	e.mu.Unlock()
	if victim != nil {
		victim.PushOut()
	}
	return victim != nil
}

// victimLocked forgets and returns the stranger that must make room; nil: there is none.
func (e *Entrance) victimLocked() (victim *Arrival) {
	most := 0
	for place := e.strangers.Front(); place != nil; place = place.Next() {
		a := place.Value.(*Arrival)
		rank := 2 * e.from[a.Source]
		if !a.Began.Load() {
			rank++
		}
		if rank > most {
			victim, most = a, rank
		}
	}
	if victim != nil {
		e.knownLocked(victim)
	}
	return victim
}

// knownLocked notes that a connection is no stranger any more.
func (e *Entrance) knownLocked(a *Arrival) {
	if a.place == nil {
		return
	}
	e.strangers.Remove(a.place)
	a.place = nil
	if e.from[a.Source]--; e.from[a.Source] == 0 {
		delete(e.from, a.Source)
	}
}

// Admit makes a connection a session of a peer. The front end chooses the peer's name so that
// nobody can make up many. A connection that replaces a session is never refused. Otherwise the
// error is ErrCrowded or ErrPeerCrowded.
func (e *Entrance) Admit(a *Arrival, peer string, replaces bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case a.session:
		return nil
	case replaces:
	case e.sessions >= e.limits.Sessions:
		return ErrCrowded
	case e.perPeer[peer] >= e.limits.PerPeer:
		return ErrPeerCrowded
	}
	e.knownLocked(a)
	a.session, a.peer = true, peer
	e.sessions++
	e.perPeer[peer]++
	return nil
}

// Leave forgets a connection. It may be called more than once.
func (e *Entrance) Leave(a *Arrival) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.knownLocked(a)
	if !a.session {
		return
	}
	a.session = false
	e.sessions--
	if e.perPeer[a.peer]--; e.perPeer[a.peer] == 0 {
		delete(e.perPeer, a.peer)
	}
}

// Strangers is the number of connections whose peer has not introduced itself.
func (e *Entrance) Strangers() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.strangers.Len()
}
