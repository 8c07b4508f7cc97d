package scsi

// Bits of byte 4 of START STOP UNIT (SBC-3 5.20).
const (
	powerConditionMask = 0xf0
	bitNoFlush         = 0x04
	bitLOEJ            = 0x02
	bitStart           = 0x01
)

// onlyStarts reports whether a START STOP UNIT does no more than make the unit ready (SBC-3 4.17).
func onlyStarts(cdb *[16]byte) bool { return cdb[4]&(powerConditionMask|bitStart) == bitStart }

// prepareStartStop validates START STOP UNIT. Only a removable unit can load or eject.
func prepareStartStop(t *Task) error {
	if request := t.CDB[4]; request&powerConditionMask == 0 && request&bitLOEJ != 0 &&
		!t.unit.Removable {
		return invalidField(4, 1)
	}
	return nil
}

// finishStartStop is START STOP UNIT. With LOEJ it loads or ejects the medium. There is no spindle
// and there are no power conditions, so nothing else changes the unit. Stopping it flushes.
func finishStartStop(t *Task) (Status, error) {
	request := t.CDB[4]
	if request&powerConditionMask != 0 {
		return StatusGood, nil // START and LOEJ are ignored then
	}
	if request&(bitStart|bitNoFlush) == 0 {
		if status, err := t.flush(); err != nil {
			return status, err
		}
	}
	if request&bitLOEJ == 0 {
		return StatusGood, nil
	}
	d, u := t.dev, t.unit
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := t.wanted(); err != nil { // it may have been aborted during the flush
		return StatusCheckCondition, err
	}
	if !t.Nexus.Admitted(u.served) {
		return StatusReservationConflict, errConflict
	}
	// SPC-4 forbids removal. We refuse loading as well, because libiscsi's conformance suite
	// expects that (PreventAllow.Eject).
	for n := range d.nexuses {
		if at := n.at(u); at != nil && at.prevents {
			return StatusCheckCondition, errRemovalPrevented
		}
	}
	eject := request&bitStart == 0
	if u.ejected.Swap(eject) && !eject {
		d.raiseLocked(u, attnMediumChanged, t.Nexus)
	}
	return StatusGood, nil
}

const bitPrevent = 0x01

// allowsRemoval reports whether a PREVENT ALLOW MEDIUM REMOVAL prevents nothing (SPC-4 5.13.3).
func allowsRemoval(cdb *[16]byte) bool { return cdb[4]&bitPrevent == 0 }

// finishPreventAllow is PREVENT ALLOW MEDIUM REMOVAL (SPC-4 6.17). Nobody can eject while any nexus
// prevents it.
func finishPreventAllow(t *Task) (Status, error) {
	t.dev.mu.Lock()
	defer t.dev.mu.Unlock()
	if err := t.wanted(); err != nil {
		return StatusCheckCondition, err
	}
	if !t.Nexus.Admitted(t.unit.served) {
		return StatusReservationConflict, errConflict // it was fenced meanwhile
	}
	t.at.prevents = t.CDB[4]&bitPrevent != 0
	return StatusGood, nil
}

// allowRemovalLocked ends what nexuses do to prevent removal of the medium.
func (d *Device) allowRemovalLocked(u *unit) {
	for n := range d.nexuses {
		if at := n.at(u); at != nil {
			at.prevents = false
		}
	}
}
