package serving

import (
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Peer is everybody with one name. All sessions of a name share it.
type Peer struct {
	name     string               // with the incarnation, if there is one: see AttachTo
	sessions atomic.Int32         // written under Disks.mu; 0: the peer is gone
	clients  map[*Client]struct{} // guarded by Disks.mu
	// at is the disk that an incarnation uses; nil: the peer is not an incarnation. order is the
	// number of the peer, in the order in which peers came.
	at    *Disk
	order uint64
}

// Name is the name of the peer.
func (p *Peer) Name() string { return p.name }

// Client is a session of a peer.
type Client struct {
	disks *Disks
	peer  *Peer
	who   Who // Address may be set later: see SetAddress
	// gaveUp says that GaveUp was called
	gaveUp atomic.Bool
	gone   bool                 // guarded by Disks.mu
	used   atomic.Pointer[Disk] // the disk that Begin has noted last
	// looking is closed when the request in afterFormer has left it; nil: no request is in it
	looking atomic.Pointer[chan struct{}]
}

// Attach begins a session of the peer with this name.
func (s *Disks) Attach(name string) *Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.attachLocked(name, nil)
}

func (s *Disks) attachLocked(name string, at *Disk) *Client {
	p := s.peers[name]
	if p == nil {
		s.came++
		p = &Peer{name: name, at: at, order: s.came, clients: map[*Client]struct{}{}}
		s.peers[name] = p
	}
	p.sessions.Add(1)
	c := &Client{disks: s, peer: p}
	p.clients[c] = struct{}{}
	return c
}

// Detach ends a session. When the last session of a peer has ended, so do its claims. Requests
// whose disk calls still run may end later. A second call does nothing.
func (c *Client) Detach() {
	s := c.disks
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.gone {
		return
	}
	c.gone = true
	for _, d := range s.disks {
		delete(d.clients, c)
	}
	delete(c.peer.clients, c)
	if c.peer.sessions.Add(-1) == 0 {
		delete(s.peers, c.peer.name)
	}
}

// Name is the name of the client's peer.
func (c *Client) Name() string { return c.peer.name }

// Peer is shared by all sessions of one name.
func (c *Client) Peer() *Peer { return c.peer }

// SetAddress sets Who.Address. Call it before the first request.
func (c *Client) SetAddress(address string) { c.who.Address = address }

// SetLine sets Who.Line. Call it before others may look for the line.
func (c *Client) SetLine(l Line) {
	c.disks.mu.Lock()
	defer c.disks.mu.Unlock()
	c.who.Line = l
}

// Address is the address of the peer's machine.
func (c *Client) Address() string { return c.who.Address }

// HoldTimeout is how long a request of the client may be held while no content comes. A long time
// is best for a peer without a time limit, such as QEMU. A peer with a limit, such as Linux, aborts
// a request that exceeds the limit, and sends it again. When that happens a second time, Linux
// resets the disk and delays all requests of the session. So the time is shorter after the first
// abort.
func (c *Client) HoldTimeout() time.Duration {
	if c.gaveUp.Load() {
		return c.disks.leastHold
	}
	return c.disks.hold
}

// GaveUp notes that the peer itself has ended a request that was held (Request.Waiting).
func (c *Client) GaveUp() { c.gaveUp.Store(true) }

// Claim makes the client's peer the owner of an exclusive disk, unless another peer owns it or the
// peer is fenced. It returns false if the client may not use the disk. A shared disk needs no
// claim.
func (c *Client) Claim(d *Disk) bool {
	return !d.exclusive.Load() || d.owner.Load() == c.peer || d.isGuest(c) || c.take(d)
}

// take is the slow path of Claim: the peer is not yet known as owner or guest.
func (c *Client) take(d *Disk) bool {
	c.disks.mu.Lock()
	defer c.disks.mu.Unlock()
	if d.isGuest(c) {
		return true // the peer was admitted a moment ago; a guest must not become the owner
	}
	// A request that ends after its session must not claim the disk again.
	if c.peer.sessions.Load() == 0 || !c.released(d) {
		if d.isFenced(c) {
			d.refused(c, time.Now())
		}
		return false
	}
	d.owner.Store(c.peer)
	return true
}

// Admitted reports whether the disk's owner does not keep the client from using the disk. It claims
// nothing, and takes no lock: a fence waits for requests that were admitted before it.
func (c *Client) Admitted(d *Disk) bool {
	return !d.exclusive.Load() || d.owner.Load() == c.peer || d.isGuest(c) || c.released(d) ||
		c.looksOn(d)
}

// Fenced reports whether a handover has fenced the client's peer, and it was not admitted again.
func (c *Client) Fenced(d *Disk) bool {
	return d.exclusive.Load() && d.isFenced(c) && !d.isGuest(c)
}

// released reports whether the client's peer may use the disk: it is not fenced, and no other peer
// has the claim. The peer is not a guest.
func (c *Client) released(d *Disk) bool {
	if d.isFenced(c) {
		return false
	}
	owner := d.owner.Load()
	return owner == nil || owner.name == c.peer.name || !d.hasClaim(owner)
}

// hasClaim reports whether the owner of a disk still has its claim. The claim ends with the owner's
// last session, but only after the owner's writes have left the disk: a write that hangs there
// could otherwise reach the disk under the next owner. The claim also lasts while the disk is open
// to a guest, which is about to become the owner. In a live migration the first machine logs out
// before the disk is handed over, and in a restart of the daemon both have no session.
func (d *Disk) hasClaim(owner *Peer) bool {
	return d.handover.Load().Guest != "" || d.busy(owner)
}

// busy reports whether the owner has a session, or its writes have not left the disk. It decides
// for another incarnation of the owner, in place of hasClaim: a guest does not keep an incarnation
// out.
func (d *Disk) busy(owner *Peer) bool {
	return owner.sessions.Load() > 0 || d.Ranges.Writing(owner.name)
}

// isGuest reports whether the client's peer was admitted in addition to the owner.
func (d *Disk) isGuest(c *Client) bool {
	guest := d.handover.Load().Guest
	return guest != "" && guest == PlainName(c.peer.name)
}

// isFenced reports whether a handover has fenced the client's peer, or its incarnation was
// superseded. The owner is never fenced.
func (d *Disk) isFenced(c *Client) bool {
	s := d.handover.Load()
	return slices.Contains(s.Fenced, PlainName(c.peer.name)) || s.superseded(c.peer.name)
}

// Owner is the name of the disk's present or last owner, without its incarnation; "": no owner is
// known.
func (d *Disk) Owner() string { return PlainName(d.ownerName()) }

// ownerName is Owner with the incarnation.
func (d *Disk) ownerName() string {
	if owner := d.owner.Load(); owner != nil {
		return owner.name
	}
	return ""
}

// maxSameNames bounds for how many names FirstUse remembers that it has warned.
const maxSameNames = 64

// FirstUse notes that a client accesses a disk for the first time. It may be called again. It warns
// once for each disk and name if the same name uses an exclusive disk from another address: two
// machines would then count as one owner. The error is ErrRemoved if the disk is removed, or a
// *Refusal: see Who.Crowd. If a first request and RemoveUnused come at the same time, one of them
// wins.
func (c *Client) FirstUse(d *Disk) error {
	s := c.disks
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.Removed() {
		return ErrRemoved
	}
	if _, known := d.clients[c]; known || c.gone {
		return nil
	}
	if err := c.otherProcessLocked(d); err != nil {
		return err
	}
	if d.clients == nil {
		d.clients = make(map[*Client]struct{})
	}
	d.clients[c] = struct{}{}
	if !d.exclusive.Load() || d.protected.Load() {
		return nil
	}
	for o := range d.clients {
		if o.peer == c.peer && o.who.Address != c.who.Address {
			s.warnSameNameLocked(d, o, c)
			break
		}
	}
	return nil
}

func (s *Disks) warnSameNameLocked(d *Disk, first, second *Client) {
	name := second.peer.name
	if _, told := d.sameNames[name]; told {
		return
	}
	if d.sameNames == nil || len(d.sameNames) >= maxSameNames {
		d.sameNames = make(map[string]struct{})
	}
	d.sameNames[name] = struct{}{}
	s.log.Warn("one initiator name uses a LUN from two addresses: if these are two machines, "+
		"both may write to it, and a handover can fence neither",
		zap.Uint16("lun", d.Number), zap.String("initiator", name),
		zap.Strings("addresses", []string{first.who.Address, second.who.Address}),
		zap.String("try", "give each machine a name of its own, by QEMU's -iscsi initiator-name= "+
			"or the library's InitiatorName: QEMU's default name comes from the domain's UUID, "+
			"and is the same at both ends of a live migration"))
}

// Uses returns the numbers of the disks that a client has accessed, in ascending order.
func (c *Client) Uses() []uint16 {
	c.disks.mu.Lock()
	defer c.disks.mu.Unlock()
	used := []uint16{}
	for _, d := range c.disks.disks {
		if _, ok := d.clients[c]; ok {
			used = append(used, d.Number)
		}
	}
	slices.Sort(used)
	return used
}
