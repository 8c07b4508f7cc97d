package serving

import (
	"fmt"
)

// AccessMode says which peers may use a disk.
type AccessMode string

// The access modes. The empty mode is AccessWriteExclusive.
const (
	// AccessWriteExclusive admits one peer at a time. The first peer that accesses the disk owns it
	// until its last session has ended. Requests of all others are refused.
	AccessWriteExclusive AccessMode = "write-exclusive"
	// AccessWriteShared admits every peer to read and write.
	AccessWriteShared AccessMode = "write-shared"
	// AccessReadShared admits every peer to read; the disk is write-protected.
	AccessReadShared AccessMode = "read-shared"
)

// ParseAccessMode parses the name of an access mode. The empty name is AccessWriteExclusive.
func ParseAccessMode(s string) (AccessMode, error) {
	switch m := AccessMode(s); m {
	case AccessWriteExclusive, AccessWriteShared, AccessReadShared:
		return m, nil
	case "":
		return AccessWriteExclusive, nil
	}
	return "", fmt.Errorf("access mode %q is unknown; use %s, %s or %s", s, AccessWriteExclusive,
		AccessWriteShared, AccessReadShared)
}

// SetAccess changes who may use a disk and whether it can be written. Requests that were admitted
// before go on. Front ends tell peers of a changed write protection. After an error nothing has
// changed.
//
// A shared disk cannot become exclusive: several peers may be writing, and nothing says which of
// them should stay. A disk that was write-protected from the beginning stays so, because it may be
// open for reading only.
func (s *Disks) SetAccess(number uint16, mode AccessMode, readOnly bool) error {
	d, err := s.use(number)
	if err != nil {
		return err
	}
	defer d.End()
	exclusive, protected := mode == AccessWriteExclusive, readOnly || mode == AccessReadShared
	d.handing.Lock() // wait for a handover under way
	defer d.handing.Unlock()
	state := *d.handover.Load()
	switch {
	case exclusive && !d.exclusive.Load():
		return fmt.Errorf("LUN %d becomes %s by a restart only: several initiators may be using it",
			number, AccessWriteExclusive)
	case !protected && d.ReadOnly:
		return fmt.Errorf("LUN %d can be written after a restart only: its disk was opened for "+
			"reading", number)
	case !exclusive && state.Guest != "":
		return fmt.Errorf("LUN %d is open for a handover: finish or cancel that first", number)
	case !exclusive && !protected:
		if err := d.forgetLast(&state); err != nil {
			return fmt.Errorf("LUN %d: %w", number, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.handover.Store(&state)
	shared := d.exclusive.Swap(exclusive) != exclusive
	changed := d.protected.Swap(protected) != protected
	for _, f := range s.fronts {
		if changed {
			f.Protected(d)
		}
		if shared {
			f.Shared(d)
		}
	}
	return nil
}

// Holders says who has an exclusive disk.
type Holders struct {
	Owner string // "": nobody
	Guest string // the peer that may use the disk in addition to its owner; "": nobody
	// Peers that a handover has fenced, without a guest that was admitted again. Read-only.
	Fenced []string
}

// Holders returns who has an exclusive disk. Other disks have no holders.
func (s *Disks) Holders(number uint16) (h Holders) {
	d := s.At(number)
	if d == nil {
		return Holders{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := d.owner.Load(); o != nil && d.hasClaim(o) {
		h.Owner = PlainName(o.name)
	}
	state := d.handover.Load()
	h.Guest = state.Guest
	for _, name := range state.Fenced {
		if name != state.Guest {
			h.Fenced = append(h.Fenced, name)
		}
	}
	return h
}
