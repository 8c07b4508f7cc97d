package serving

import (
	"errors"
	"fmt"
	"time"
)

// In a live migration two peers use an exclusive disk for a while: the machine that the guest moves
// to logs in and reads while the other machine still writes. Admit opens the disk to the second
// peer. HandOver makes it the owner and fences the first peer. Withdraw closes the disk to the
// second peer again. A fenced peer stays fenced until the disk is opened to it again.

// ErrNotLoggedIn is the error of HandOver if the peer that should become the owner has no session.
// The disk then stays with its owner.
var ErrNotLoggedIn = errors.New("is not logged in")

// Opening is a disk that a second peer may use in addition to its owner.
type Opening struct {
	LUN   uint16
	To    string
	Until time.Time // zero: until HandOver or Withdraw
}

// Admit opens an exclusive disk to a peer in addition to its owner. After an error nothing has
// changed. Admit does not close the disk again at the time until: the caller does, and finds that
// time in Openings, also after a restart.
func (s *Disks) Admit(number uint16, peer string, until time.Time) error {
	d, err := s.useExclusive(number)
	if err != nil {
		return err
	}
	defer d.End()
	d.handing.Lock()
	defer d.handing.Unlock()
	next := *d.handover.Load()
	name := NormalName(peer)
	if next.Guest != "" && next.Guest != name {
		return fmt.Errorf("LUN %d is open to %s already; finish or cancel that first", number,
			next.Guest)
	}
	if next.Owner = d.ownerName(); PlainName(next.Owner) == name {
		return fmt.Errorf("LUN %d belongs to %s; name the initiator that is to take it over",
			number, name)
	}
	next.Guest, next.Until = name, until
	if err := d.saveHandover(&next); err != nil {
		return err
	}
	s.mu.Lock()
	taken := d.ownerName() != next.Owner
	if !taken {
		d.handover.Store(&next)
	}
	s.mu.Unlock()
	if taken {
		return errors.Join(fmt.Errorf("LUN %d was taken by %s meanwhile; try again", number,
			d.Owner()), d.saveHandover(d.handover.Load()))
	}
	return nil
}

// HandOver makes the admitted peer the owner of the disk. When it returns, the requests of all
// other peers are refused, and none that is still under way can change the disk. Rights that the
// others held at a front end are gone. The former owner is fenced, also after a restart. HandOver
// returns its name, or "" if no owner is known. If the new owner has no session, or the disk's
// store cannot save the change, HandOver changes nothing.
func (s *Disks) HandOver(number uint16) (former string, err error) {
	how, err := s.fenceOff(number, s.handoverLocked,
		func(name string, how outcome) bool { return PlainName(name) != how.guest },
		func(d *Disk, how outcome) { d.owner.Store(s.peers[how.owner]) })
	return how.loser, err
}

// Withdraw closes a disk to the peer that Admit has opened it to, and fences that peer as HandOver
// fences the owner. The disk stays with its owner. Withdraw returns the name of the fenced peer.
func (s *Disks) Withdraw(number uint16) (guest string, err error) {
	how, err := s.fenceOff(number, (*Disk).withdrawal,
		func(name string, how outcome) bool { return PlainName(name) == how.guest },
		func(*Disk, outcome) {})
	return how.loser, err
}

// Openings lists the disks that are open to a second peer, for use after a restart.
func (s *Disks) Openings() (openings []Opening) {
	for _, d := range s.All() {
		if h := d.handover.Load(); h.Guest != "" {
			openings = append(openings, Opening{LUN: d.Number, To: h.Guest, Until: h.Until})
		}
	}
	return openings
}

// outcome is the result for a disk that was open to a guest, or that another incarnation of its
// owner takes over.
type outcome struct {
	guest      string // the peer that the disk was open to; "": what is open stays open
	owner      string // the new owner, with its incarnation; "": nobody
	loser      string // the peer that is fenced; "": nobody
	superseded string // incarnations that may never use the disk again, joined by newlines
}

// fenceOff gives a disk to its next owner. find decides the outcome, or why there can be none.
// commit applies it. Both are called with Disks.mu held. Peers for which fenced returns true lose
// their rights.
func (s *Disks) fenceOff(number uint16, find func(*Disk) (outcome, error),
	fenced func(name string, how outcome) bool, commit func(d *Disk, how outcome),
) (outcome, error) {
	d, err := s.useExclusive(number)
	if err != nil {
		return outcome{}, err
	}
	defer d.End()
	d.handing.Lock()
	how, fences, err := s.closeTo(d, find, fenced, commit)
	d.handing.Unlock()
	if err != nil {
		return outcome{}, err
	}
	for _, f := range fences {
		f.Finish()
	}
	// A request that was aborted before it holds its range changes nothing once it gets the range
	// (see Request.Lock). Sessions that have ended may have left writes in a slow disk.
	d.Ranges.Drain(func(name string) bool { return fenced(name, how) })
	return how, nil
}

func (s *Disks) closeTo(d *Disk, find func(*Disk) (outcome, error),
	fenced func(name string, how outcome) bool, commit func(d *Disk, how outcome)) (
	how outcome, fences []Fencing, err error) {
	s.mu.Lock()
	how, err = find(d)
	fronts := s.fronts
	s.mu.Unlock()
	if err != nil {
		return outcome{}, nil, err
	}
	before, next := d.handover.Load(), d.handover.Load().ended(how)
	if err := d.saveHandover(next); err != nil {
		return outcome{}, nil, err
	}
	for _, f := range fronts {
		fencing, fenceErr := f.Fence(d, func(name string) bool { return fenced(name, how) })
		if fenceErr != nil {
			err = fenceErr
			break
		}
		fences = append(fences, fencing)
	}
	if err == nil {
		err = s.commit(d, how, find, next, commit, fences)
	}
	if err != nil {
		errs := []error{err}
		for _, f := range fences {
			errs = append(errs, f.Undo())
		}
		return outcome{}, nil, errors.Join(append(errs, d.saveHandover(before))...)
	}
	return how, fences, nil
}

// commit publishes the saved state, unless the outcome would be another one by now.
func (s *Disks) commit(d *Disk, how outcome, find func(*Disk) (outcome, error),
	next *handoverState, commit func(d *Disk, how outcome), fences []Fencing) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch now, err := find(d); {
	case err != nil:
		return err
	case now != how:
		return fmt.Errorf("LUN %d was taken by %s meanwhile, and stays open to %s; try again",
			d.Number, d.Owner(), now.guest)
	}
	commit(d, how)
	d.handover.Store(next)
	for _, f := range fences {
		f.Commit()
	}
	return nil
}

// withdrawal is the outcome of Withdraw: the guest is fenced.
func (d *Disk) withdrawal() (outcome, error) {
	guest := d.handover.Load().Guest
	if guest == "" {
		return outcome{}, fmt.Errorf("LUN %d is open to nobody but its owner", d.Number)
	}
	return outcome{guest: guest, owner: d.ownerName(), loser: guest}, nil
}

// handoverLocked is the outcome of HandOver: the guest is the owner, and the former owner is
// fenced.
func (s *Disks) handoverLocked(d *Disk) (outcome, error) {
	how, err := d.withdrawal()
	if err != nil {
		return outcome{}, fmt.Errorf("%w; open it first", err)
	}
	heir := s.attachedLocked(d, how.guest)
	if heir == "" {
		return outcome{}, fmt.Errorf("%s %w, so LUN %d stays with its owner", how.guest,
			ErrNotLoggedIn, d.Number)
	}
	return outcome{guest: how.guest, owner: heir, loser: d.Owner()}, nil
}

// useExclusive finds a disk with exclusive access and counts a use of it, until Disk.End.
func (s *Disks) useExclusive(number uint16) (*Disk, error) {
	d, err := s.use(number)
	if err == nil && !d.exclusive.Load() {
		d.End()
		err = fmt.Errorf("LUN %d is open to every initiator anyway: its access mode is not %s",
			number, AccessWriteExclusive)
	}
	return d, err
}
