package scsi

import (
	"math/bits"
	"sync/atomic"
)

// attention is a set of unit attention conditions (SAM-5 5.14), one bit each. The lowest bit is
// reported first, which gives the order of precedence of SAM-5 5.14.2.
type attention uint32

const (
	attnPowerOn attention = 1 << iota
	attnReset
	attnNexusLoss
	attnCapacityChanged
	attnModeChanged
	attnReservationsPreempted
	attnReservationsReleased
	attnRegistrationsPreempted
	attnClearedByOther
	attnLUNsChanged
)

// attentionCodes holds the additional sense code of each bit.
var attentionCodes = [...]additional{
	ascPowerOnOrReset,
	ascBusDeviceReset,
	ascNexusLoss,
	ascCapacityChanged,
	ascModeChanged,
	ascReservationsPreempted,
	ascReservationsReleased,
	ascRegistrationsPreempted,
	ascClearedByOther,
	ascLUNsChanged,
}

// attentions are the pending unit attentions of one nexus at one logical unit. The zero value is
// ready to use. Any number of goroutines may use it.
type attentions struct{ pending atomic.Uint32 }

func (a *attentions) raise(c attention) { a.pending.Or(uint32(c)) }

func (a *attentions) clear(c attention) { a.pending.And(^uint32(c)) }

// take removes the condition of highest precedence and returns its sense data, or nil if there is
// none.
func (a *attentions) take() *senseError {
	for {
		p := a.pending.Load()
		if p == 0 {
			return nil
		}
		if a.pending.CompareAndSwap(p, p&(p-1)) {
			return &senseError{key: UnitAttention, code: attentionCodes[bits.TrailingZeros32(p)]}
		}
	}
}

// PendingAttention answers QUERY ASYNCHRONOUS EVENT for a nexus at a logical unit (SAM-5 7). It
// says whether a unit attention is pending, and does not clear it. info describes the attention
// that will be reported next: whether it is the only one, its sense key and its additional sense
// code.
func (d *Device) PendingAttention(lun uint64, n *Nexus) (info [3]byte, pending bool) {
	const one, several = 0x10, 0x20 // UADE DEPTH
	u := d.unit(lun)
	if u == nil {
		return info, false
	}
	at := n.at(u)
	if at == nil {
		return info, false
	}
	p := at.pending.Load()
	if p == 0 {
		return info, false
	}
	depth := byte(one)
	if p&(p-1) != 0 {
		depth = several
	}
	code := attentionCodes[bits.TrailingZeros32(p)]
	return [3]byte{depth | byte(UnitAttention), byte(code >> 8), byte(code)}, true
}

// raiseLocked raises the condition for every nexus at the unit except except; nil: for all.
func (d *Device) raiseLocked(u *unit, c attention, except *Nexus) {
	for n := range d.nexuses {
		if n != except {
			n.raise(u, c)
		}
	}
}

// raise raises the condition for the nexus at a unit. It does nothing if the unit is removed.
func (n *Nexus) raise(u *unit, c attention) {
	if at := n.at(u); at != nil {
		at.raise(c)
	}
}

// ResetLUN does what a LOGICAL UNIT RESET asks of the device server (SAM-5 6.3.3). Mode pages
// return to their defaults. A RESERVE(6) reservation ends. Every nexus gets a unit attention, also
// the sender of the reset. Persistent reservations stay (SPC-4 5.13.1).
func (d *Device) ResetLUN(lun uint64) {
	u := d.unit(lun)
	if u == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.resetLocked(u)
}

// ResetTarget does what a target reset asks of the device server (SAM-5 6.3.2): it resets every
// logical unit.
func (d *Device) ResetTarget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, u := range d.luns.Load().units {
		d.resetLocked(u)
	}
}

func (d *Device) resetLocked(u *unit) {
	u.resets.Add(1)
	d.forgetCopiesLocked(u)
	u.mode.bits.Store(modeDefault)
	d.reserveLocked(u, nil)
	d.raiseLocked(u, attnReset, nil)
}

// TasksCleared raises the unit attention 2F/00 (SAM-5 7.4) for nexuses whose commands another nexus
// aborted by CLEAR TASK SET. The transport has already dropped those commands.
func (d *Device) TasksCleared(lun uint64, by *Nexus, affected []*Nexus) {
	u := d.unit(lun)
	if u == nil {
		return
	}
	for _, n := range affected {
		if n != by {
			n.raise(u, attnClearedByOther)
		}
	}
}
