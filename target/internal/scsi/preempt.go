package scsi

import "slices"

// abortPreempted ends the commands of the nexuses whose registrations a PREEMPT AND ABORT removed
// (SPC-4 5.13.11.5). They do not prevent the removal of the medium any more (SPC-4 6.17).
func (d *Device) abortPreempted(t *Task, removed []InitiatorPort) {
	d.mu.Lock()
	var nexuses []*Nexus
	for n := range d.nexuses {
		if at := n.at(t.unit); at != nil && slices.Contains(removed, n.port) {
			at.prevents = false
			nexuses = append(nexuses, n)
		}
	}
	d.mu.Unlock()
	d.fence(t.unit, nexuses, t, func(name string) bool {
		return slices.ContainsFunc(removed, func(p InitiatorPort) bool { return p.Name == name })
	})
}

// fence ends the commands of nexuses at a unit, except one, and waits until no write of these
// initiators can reach the disk any more: whoever fences another one off relies on that. No new
// command of theirs is let through by now. Sessions that have ended leave writes behind that a slow
// disk still works on, so that it is not the nexuses that are waited for.
func (d *Device) fence(u *unit, nexuses []*Nexus, except *Task, initiators func(name string) bool) {
	if d.opt.Abort != nil && len(nexuses) > 0 {
		d.opt.Abort(nexuses, func(t *Task) bool { return t.unit == u && t != except })
	}
	// What was aborted before it holds its blocks changes nothing when it does (see
	// Task.lockRange).
	u.ranges.Drain(initiators)
}
