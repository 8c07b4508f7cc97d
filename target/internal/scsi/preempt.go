package scsi

import "slices"

// abortPreempted ends the commands of nexuses whose registrations a PREEMPT AND ABORT removed
// (SPC-4 5.13.11.5).
func (d *Device) abortPreempted(t *Task, removed []InitiatorPort) {
	d.mu.Lock()
	var nexuses []*Nexus
	for n := range d.nexuses {
		if at := n.at(t.unit); at != nil && slices.Contains(removed, n.port) {
			nexuses = append(nexuses, n)
		}
	}
	d.mu.Unlock()
	d.abort(t.unit, nexuses, t)
	// A command that was aborted before it holds its range changes nothing once it gets the range
	// (see Task.lockRange). Sessions that have ended may leave writes behind that a slow disk still
	// works on. So this waits for writes by initiator name, not by nexus.
	t.unit.Ranges.Drain(func(name string) bool {
		return slices.ContainsFunc(removed, func(p InitiatorPort) bool { return p.Name == name })
	})
}

// abort ends the commands of nexuses at a unit, except one. Their new commands are already refused
// when it is called.
func (d *Device) abort(u *unit, nexuses []*Nexus, except *Task) {
	if d.opt.Abort != nil && len(nexuses) > 0 {
		d.opt.Abort(nexuses, func(t *Task) bool { return t.unit == u && t != except })
	}
}
