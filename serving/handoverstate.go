package serving

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"go.uber.org/zap"
)

// handoverState is what a write-exclusive disk must know about handovers after a restart. It never
// changes once it is published.
//
// The loser of a handover stays fenced even when the winner is gone, for a while or for good. The
// loser's machine logs in again by itself, and could then write data from the time before the
// handover. But the guest has run on another machine since, or still runs there, and that write
// would destroy its data. Only an operator knows that nothing is left to be written.
type handoverState struct {
	// the last owner, which the next handover fences; "": nobody
	Owner string `json:"owner,omitempty"`
	// the peer that may use the disk in addition to its owner; "": nobody
	Guest  string    `json:"open_to,omitempty"`
	Until  time.Time `json:"until,omitzero"`   // see Disks.Admit
	Fenced []string  `json:"fenced,omitempty"` // fenced peers, oldest first
	// superseded incarnations, oldest first
	Superseded []string `json:"over,omitempty"`
}

// maxFenced bounds how many fenced peers a disk remembers. Beyond that it forgets the oldest: a
// disk may be handed over for years to names that never come back.
const maxFenced = 1024

// maxOver is the same for superseded incarnations. There is one for each start of a client.
const maxOver = 256

// ended returns the state after a handover or takeover. The loser, if any, is fenced. The guest is
// not fenced unless it is the loser.
func (s *handoverState) ended(how outcome) *handoverState {
	fenced := slices.DeleteFunc(slices.Clone(s.Fenced),
		func(name string) bool { return name == how.guest || name == how.loser })
	if how.loser != "" {
		fenced = append(fenced, how.loser)
	}
	next := &handoverState{Owner: how.owner, Fenced: fenced[max(0, len(fenced)-maxFenced):],
		Superseded: s.Superseded}
	if how.guest != s.Guest {
		next.Guest, next.Until = s.Guest, s.Until
	}
	if how.superseded != "" {
		over := append(slices.Clone(s.Superseded), strings.Split(how.superseded, "\n")...)
		next.Superseded = over[max(0, len(over)-maxOver):]
	}
	return next
}

// superseded reports whether a peer is an incarnation that was superseded.
func (s *handoverState) superseded(name string) bool {
	return len(s.Superseded) > 0 && slices.Contains(s.Superseded, name)
}

// encode returns the stored form of the state. It fails if RFC 3339 cannot express the year of
// Until.
func (s *handoverState) encode() ([]byte, error) {
	if s.Owner == "" && s.Guest == "" && len(s.Fenced) == 0 && len(s.Superseded) == 0 {
		return nil, nil
	}
	return json.Marshal(s)
}

// valid reports whether all names in the state can be names of peers.
func (s *handoverState) valid() bool {
	bad := func(name string) bool { return !ValidName(PlainName(name)) }
	return (s.Owner == "" || !bad(s.Owner)) && (s.Guest == "" || ValidName(s.Guest)) &&
		!slices.ContainsFunc(s.Fenced, func(name string) bool { return !ValidName(name) }) &&
		!slices.ContainsFunc(s.Superseded, bad)
}

// maxName is the length of the longest iSCSI name in bytes (RFC 7143 4.2.7.1).
const maxName = 223

// ValidName reports whether a peer can have this name. What is no UTF-8 would come back from the
// disk's state as another name.
func ValidName(name string) bool {
	return name != "" && len(name) <= maxName &&
		!strings.ContainsFunc(name, func(r rune) bool {
			return r == unicode.ReplacementChar || unicode.IsSpace(r) || !unicode.IsPrint(r)
		})
}

// Prefixes of the names of peers that have no iSCSI name. No initiator may have such a name.
const (
	CertificatePrefix = "cert:" // followed by the name in a certificate
	SocketPrefix      = "unix:" // followed by the path of the socket at which peers connect
	AddressPrefix     = "tcp:"  // followed by the address at which peers connect
)

// IsInitiator reports whether a name could be that of an iSCSI initiator.
func IsInitiator(name string) bool {
	return !slices.ContainsFunc([]string{CertificatePrefix, SocketPrefix, AddressPrefix},
		func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// NormalName is the form in which names are compared. Letter case does not matter in iSCSI names
// (RFC 7143 4.2.7.1). In others it does.
func NormalName(name string) string {
	if IsInitiator(name) {
		return strings.ToLower(name)
	}
	return name
}

// saveHandover stores next. The caller has handing, and publishes next afterwards.
func (d *Disk) saveHandover(next *handoverState) error {
	data, err := next.encode()
	if err == nil {
		before, _ := d.handover.Load().encode() // it was saved or read before, so it can be encoded
		_, err = ReplaceStored(d.Store, storedHandover, data, before)
	}
	if err != nil {
		return fmt.Errorf("who may use LUN %d could not be saved, and stays as it was: %w",
			d.Number, err)
	}
	return nil
}

// KeepOwner stores the name of the disk's owner if it has changed: the next handover has to fence
// that owner even if it has not come back after a restart. Requests that have claimed the disk call
// this before they are answered; Claim itself waits for no storage. If saving fails, requests go
// on, because the name only matters after a restart, and a request tries again after keepEvery.
func (s *Disks) KeepOwner(d *Disk) {
	if !d.exclusive.Load() || d.Store == nil || d.owner.Load() == d.kept.Load() {
		return
	}
	if u := d.unkept.Load(); u != nil && u.owner == d.owner.Load() && time.Now().Before(u.again) {
		return
	}
	d.handing.Lock()
	defer d.handing.Unlock()
	owner := d.owner.Load()
	next := *d.handover.Load()
	if d.kept.Load() == owner || !d.exclusive.Load() { // by now
		return
	}
	if next.Owner == owner.name {
		d.kept.Store(owner)
		return
	}
	next.Owner = owner.name
	data, err := next.encode()
	if err == nil {
		// If Save has stored the state despite an error, that does no harm: the state is right.
		err = d.Store.Save(storedHandover, data)
	}
	if err != nil {
		before := d.unkept.Swap(&unkept{owner, time.Now().Add(keepEvery)})
		if before == nil || before.owner != owner {
			s.log.Warn("who uses the LUN cannot be saved: until it is, a handover fences this "+
				"initiator only if it comes before the daemon is restarted, or this initiator has "+
				"used the LUN again by then", zap.Uint16("lun", d.Number),
				zap.String("initiator", owner.name), zap.Error(err))
		}
		return
	}
	if d.unkept.Swap(nil) != nil {
		s.log.Info("who uses the LUN is saved again", zap.Uint16("lun", d.Number),
			zap.String("initiator", owner.name))
	}
	s.mu.Lock()
	d.handover.Store(&next)
	s.mu.Unlock()
	d.kept.Store(owner) // only now that it is stored: other requests of the owner wait for that
}

// unkept is an owner that could not be stored, and the time when a request tries again.
type unkept struct {
	owner *Peer
	again time.Time
}

// keepEvery is how long requests go on after an owner could not be stored, before one tries again.
const keepEvery = time.Second

// restoreHandover loads the stored state. A disk that was open is open again, and still belongs to
// its owner, which has no session yet. A disk that was not open can be claimed by others, as if its
// owner had left.
func (d *Disk) restoreHandover() error {
	s := &handoverState{}
	if d.Store != nil && !d.exclusive.Load() && !d.protected.Load() {
		var before handoverState // an error in it is reported when the disk is exclusive again
		if b, err := d.Store.Load(storedHandover); err == nil && json.Unmarshal(b, &before) == nil {
			if err := d.forgetLast(&before); err != nil {
				return err
			}
		}
	}
	if d.Store != nil && d.exclusive.Load() {
		content, err := d.Store.Load(storedHandover)
		if err != nil {
			return fmt.Errorf("what a handover has left, without which it is unknown who may "+
				"write to the disk: %w", err)
		}
		if len(content) > 0 {
			if err = json.Unmarshal(content, s); err == nil && !s.valid() {
				err = errors.New("it has a name that no initiator can have")
			}
		}
		if err != nil {
			return fmt.Errorf("what a handover has left cannot be read, and who may write to the "+
				"disk is unknown: make sure that one machine has the guest, "+
				"and remove %s to start with nobody fenced: %w", d.Store.Where(storedHandover), err)
		}
	}
	d.handover.Store(s)
	if s.Owner != "" {
		d.owner.Store(&Peer{name: s.Owner})
	}
	return nil
}

// Kept reports whether a front end may restore what it has stored for a peer, such as reservations,
// after a restart. It may not if the peer is fenced and was not admitted again: the daemon may have
// ended after the fence was saved, and before the peer's rights were removed.
func (d *Disk) Kept(name string) bool {
	s := d.handover.Load()
	return name == s.Guest || !slices.Contains(s.Fenced, name)
}
