package serving

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"go.uber.org/zap"
)

// Several clients may have one name, such as relays in pods with the same certificate. A client may
// also tell an incarnation, which tells it from others of the name. A disk has one incarnation of a
// name at a time. An incarnation is drawn at each start of a client, and never comes back after it
// was superseded by another. So no operator has to decide: late requests of the former one, such as
// a write that its machine still sends, are refused for good.
//
// When a client is gone, the first request of the next one takes the disk over. While the client is
// still there, only the target of a live migration can take over, and it must say that it is one.
// It does so with its first write. Until then it only reads. The source still writes, and keeps the
// disk if the migration is cancelled.

func incarnationName(name, incarnation string) string {
	if incarnation == "" {
		return name
	}
	return name + " " + incarnation // no name has a space
}

// PlainName is a peer's name without its incarnation.
func PlainName(name string) string {
	name, _, _ = strings.Cut(name, " ")
	return name
}

// sameName reports whether two peers are different incarnations of one name.
func sameName(a, b string) bool {
	return a != b && PlainName(a) == PlainName(b) && PlainName(a) != a && PlainName(b) != b
}

// Superseded reports whether another incarnation has superseded this one at a disk.
func (d *Disk) Superseded(name, incarnation string) bool {
	return d.exclusive.Load() && d.handover.Load().superseded(incarnationName(name, incarnation))
}

// Superseded reports whether another incarnation has superseded the client's at a disk.
func (c *Client) Superseded(d *Disk) bool {
	return d.exclusive.Load() && d.handover.Load().superseded(c.peer.name)
}

// Owns reports whether the client's peer owns the disk, or the disk is shared. Then ClaimFor is
// quick.
func (c *Client) Owns(d *Disk) bool { return d.owner.Load() == c.peer || !d.exclusive.Load() }

// ClaimFor is Claim for one request; write says that it changes the disk. It waits for the requests
// of an incarnation that the client supersedes, and for the disk.
func (c *Client) ClaimFor(d *Disk, write bool) bool {
	owner := d.owner.Load()
	switch {
	case c.Owns(d):
		return true
	case c.who.MigrationTarget && !write && (owner == nil || c.looksOn(d)):
		return !d.isFenced(c)
	case owner == nil || !sameName(owner.name, c.peer.name):
		return c.Claim(d)
	case d.isFenced(c) || !c.who.MigrationTarget && d.busy(owner):
		return false
	}
	err := c.disks.takeOver(d, c)
	if err != nil && !errors.Is(err, errHeld) {
		c.disks.log.Warn("a client cannot have the disk yet", zap.Uint16("lun", d.Number),
			zap.String("client", PlainName(c.peer.name)), zap.Error(err))
	}
	return err == nil
}

// looksOn reports whether the client may read together with the owner that it will supersede.
func (c *Client) looksOn(d *Disk) bool {
	owner := d.owner.Load()
	return c.who.MigrationTarget && owner != nil && sameName(owner.name, c.peer.name) &&
		!d.isFenced(c)
}

var (
	// errOwns says that another request of the client was faster.
	errOwns = errors.New("the client has the disk")
	errHeld = errors.New("another client of that name has the disk")
)

// takeOver makes the client's peer the owner of a disk in place of another incarnation, as HandOver
// does. Then it flushes the disk, because the former one cannot repeat its acknowledged writes any
// more. If the client is the target of a migration, earlier targets are superseded, too: their
// migrations were cancelled.
func (s *Disks) takeOver(d *Disk, c *Client) error {
	_, err := s.fenceOff(d.Number, func(d *Disk) (outcome, error) { return s.takeoverLocked(d, c) },
		func(name string, _ outcome) bool { return sameName(name, c.peer.name) },
		func(d *Disk, _ outcome) { d.owner.Store(c.peer) })
	if errors.Is(err, errOwns) {
		return nil
	}
	if err != nil {
		return err
	}
	s.log.Info("a client of the same name has taken the disk over: the former one is fenced",
		zap.Uint16("lun", d.Number), zap.String("client", PlainName(c.peer.name)),
		zap.Bool("migration", c.who.MigrationTarget))
	if !d.Begin() {
		return ErrRemoved
	}
	defer d.End()
	return d.Disk.Flush()
}

func (s *Disks) takeoverLocked(d *Disk, c *Client) (outcome, error) {
	owner := d.owner.Load()
	switch {
	case owner == c.peer:
		return outcome{}, errOwns
	case owner == nil || !sameName(owner.name, c.peer.name) || d.isFenced(c) ||
		c.peer.sessions.Load() == 0,
		// the owner may be connected again without a request
		!c.who.MigrationTarget && (d.busy(owner) || s.peers[owner.name] != nil):
		return outcome{}, errHeld
	}
	former := map[string]struct{}{owner.name: {}}
	for o := range d.clients {
		if c.who.MigrationTarget && o.who.MigrationTarget && sameName(o.peer.name, c.peer.name) {
			former[o.peer.name] = struct{}{}
		}
	}
	return outcome{owner: c.peer.name,
		superseded: strings.Join(slices.Sorted(maps.Keys(former)), "\n")}, nil
}

// attachedLocked is the name of the peer with a session that a disk is handed over to. name is the
// name that an operator knows. Of several incarnations at the disk, it is the last one that has
// come, because an incarnation does not come back after the next one. "": there is none.
func (s *Disks) attachedLocked(d *Disk, name string) (found string) {
	var last uint64
	for other, p := range s.peers {
		if p.at == d && PlainName(other) == name && p.order > last &&
			!d.handover.Load().superseded(other) {
			found, last = other, p.order
		}
	}
	if found == "" && s.peers[name] != nil {
		return name
	}
	return found
}
