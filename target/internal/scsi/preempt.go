package scsi

import "slices"

// abortPreempted ends the commands of the nexuses whose registrations a PREEMPT AND ABORT removed (SPC-4 5.13.11.5), and
// waits until none of their writes can reach the disk any more: whoever fences another one off relies on that.
func (d *Device) abortPreempted(t *Task, removed []InitiatorPort) {
	d.mu.Lock()
	var nexuses []*Nexus
	for n := range d.nexuses {
		if slices.Contains(removed, n.port) {
			nexuses = append(nexuses, n)
		}
	}
	d.mu.Unlock()
	if d.opt.Abort != nil && len(nexuses) > 0 {
		d.opt.Abort(t.unit.number, nexuses, t)
	}
	// Sessions that have ended leave writes behind that a slow disk still works on.
	t.unit.ranges.drain(removed)
}

// Fences says what a PREEMPT AND ABORT at a LUN has to do with a command that a transport has in hand, of which only its
// 8-byte LUN and its CDB are looked at: whether it is one of that LUN, and whether it may change the medium.
func (d *Device) Fences(number uint16, lun uint64, cdb *[16]byte) (addressed, writes bool) {
	u := d.unit(lun)
	if u == nil || u.number != number {
		return false, false
	}
	cmd, _ := u.table.lookup(cdb)
	return true, cmd != nil && cmd.flags&writesMedium != 0
}

// drain waits for the writes of these initiators that are under way, not for those that begin later.
func (r *rangeTable) drain(of []InitiatorPort) {
	place := &hold{kind: holdRead} // without a range it is in nobody's way
	r.mu.Lock()
	r.held = append(r.held, place)
	for r.writesBeforeLocked(place, of) {
		r.waiting++
		r.changed.Wait()
		r.waiting--
	}
	r.mu.Unlock()
	r.unlock(place)
}

// writesBeforeLocked reports whether a write of these initiators came before a place.
func (r *rangeTable) writesBeforeLocked(place *hold, of []InitiatorPort) bool {
	for _, h := range r.held {
		if h == place {
			return false
		}
		if h.kind != holdRead && h.by != nil && slices.ContainsFunc(of, func(p InitiatorPort) bool { return p.Name == h.by.name }) {
			return true
		}
	}
	return false
}
