package serving

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// A peer that has lost or closed a connection comes back, often before the end of the former
// connection was noticed here. It must be let in, and requests of the former connection must not be
// executed after those of the new one. This is a takeover. There are three kinds:
//
//   - All clients at a Unix socket have one name. So a disk is for one process of the name at a
//     time, or for one connection if the process is not known. The next process waits for the end
//     of the former one.
//   - A client that tells its incarnation (see incarnation.go) waits for the end of the incarnation
//     before it, which may never use the disk again.
//   - A new connection of the same incarnation ends the former one, and waits for its requests:
//     Client.TakeOver.
//
// A protocol with sessions of its own, such as iSCSI, decides by itself which session a login
// reinstates (RFC 7143 6.3.5). Every front end calls EndStale, so that a connection that its peer
// has closed no longer counts.

// Line is the connection of a client.
type Line interface {
	// HungUp reports whether the peer has closed the connection, even if nobody has read its end
	// yet.
	HungUp() bool
	// End ends the connection because of err. Requests that have not begun to change a disk never
	// do.
	End(err error)
	// AwaitRequests waits until the goroutines that execute its requests have ended.
	AwaitRequests()
}

// Who identifies a client.
type Who struct {
	Name string
	// Incarnation tells the client from others of its name, in letters and digits; "": none.
	Incarnation string
	// MigrationTarget says that the client is the target of a live migration: see incarnation.go.
	MigrationTarget bool
	// Crowd says that everybody who may open a socket has this name. Process, the id of the peer's
	// process, tells them apart; 0: it is unknown.
	Crowd   bool
	Process int32
	// Address is the address of the peer's machine, without parts that differ between its sessions.
	Address string
	Line    Line // nil: nobody can end the connection
}

// AttachTo begins a session that is for one disk.
func (s *Disks) AttachTo(d *Disk, who Who) *Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	if who.Incarnation == "" {
		d = nil
	}
	c := s.attachLocked(incarnationName(who.Name, who.Incarnation), d)
	c.who = who
	return c
}

// clientsOf returns the clients of all incarnations of a name that have a Line.
func (s *Disks) clientsOf(name string) (all []*Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for other, p := range s.peers {
		if PlainName(other) != PlainName(name) {
			continue
		}
		for c := range p.clients {
			if c.who.Line != nil {
				all = append(all, c)
			}
		}
	}
	return all
}

// EndStale ends the clients of a name whose connections the peer has closed, even if nobody has
// noticed yet.
func (s *Disks) EndStale(name string) {
	for _, c := range s.clientsOf(name) {
		if c.who.Line.HungUp() {
			c.who.Line.End(io.EOF)
			c.Detach()
		}
	}
}

// longestEnding limits how long a request waits for the end of a former client of its name. The
// news of that end may be on its way: a relay may pass it on after the new connection.
const longestEnding = 128 * time.Millisecond

// afterFormer calls begin until it no longer fails because of a former client of the name, or until
// that client seems to stay. Only one request of the client does so at a time. Requests that come
// meanwhile wait for its outcome, because a client may send thousands.
func (c *Client) afterFormer(begin func() error) error {
	mine := make(chan struct{})
	if !c.looking.CompareAndSwap(nil, &mine) {
		c.waitedForFormer()
		return begin()
	}
	defer func() {
		c.looking.Store(nil)
		close(mine)
	}()
	for wait := time.Millisecond; ; wait *= 2 {
		c.disks.EndStale(c.peer.name)
		err := begin()
		var refusal *Refusal
		if !errors.As(err, &refusal) || !refusal.former || wait >= longestEnding {
			return err
		}
		time.Sleep(wait)
	}
}

// waitedForFormer waits for a request of the client in afterFormer, and reports whether there was
// one.
func (c *Client) waitedForFormer() bool {
	other := c.looking.Load()
	if other != nil {
		<-*other
	}
	return other != nil
}

// sameProcess reports whether two clients of a crowd are of one process.
func sameProcess(a, b *Client) bool {
	return a.who.Process != 0 && a.who.Process == b.who.Process
}

// otherProcessLocked returns a *Refusal if another process of a crowd uses the disk by the client's
// name, or if writes of that process have not left the disk. Otherwise the disk is now for the
// client's process.
func (c *Client) otherProcessLocked(d *Disk) error {
	if !c.who.Crowd || !d.exclusive.Load() {
		return nil
	}
	name := c.peer.name
	last, used := d.processes[name]
	busy := used && last != c.who.Process && d.Ranges.Writing(name)
	for o := range d.clients {
		busy = busy || o != c && o.peer == c.peer && !sameProcess(o, c)
	}
	if busy {
		return &Refusal{fmt.Sprintf("LUN %d is in use by another process at the same socket",
			d.Number), true}
	}
	if d.processes == nil {
		d.processes = map[string]int32{}
	}
	d.processes[name] = c.who.Process
	return nil
}

// ErrTakenOver ends a connection in favour of a newer one of its incarnation.
var ErrTakenOver = errors.New("a newer connection of its session has replaced it")

// takeoverTimeout is how long a client waits for the requests of its former connection. Then it is
// refused, and may try again.
const takeoverTimeout = 20 * time.Second

// TakeOver ends the other connections of the client's incarnation, and waits until their requests
// have ended. If ctx ends first, it returns the cause of ctx.
func (c *Client) TakeOver(ctx context.Context) error {
	if c.who.Incarnation == "" {
		return nil
	}
	var former []Line
	for _, o := range c.disks.clientsOf(c.peer.name) {
		if o != c && o.peer == c.peer {
			o.who.Line.End(ErrTakenOver)
			former = append(former, o.who.Line)
		}
	}
	if len(former) == 0 {
		return nil
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, o := range former {
			o.AwaitRequests()
		}
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(takeoverTimeout):
		return errors.New("requests of the session's former connection have not ended yet: the " +
			"storage of the disk does not answer")
	}
}
