package scsi

import (
	"slices"
	"sync/atomic"
)

// copyOperation is an EXTENDED COPY under way, or what is told of one that has ended.
type copyOperation struct {
	unit     *unit // the copy manager
	id       byte
	segments atomic.Uint32 // begun
	bytes    atomic.Uint64 // written

	task   *Task  // guarded by Device.mu; nil: it has ended
	failed bool   // guarded by Device.mu
	status Status // guarded by Device.mu; with which it has ended
	sense  []byte // guarded by Device.mu; until it was asked for
	told   bool   // guarded by Device.mu; its end was asked for
}

// maxCopiesTold bounds how many copies that have ended a nexus is told of.
const maxCopiesTold = 32

var errOperationInProgress = &senseError{key: IllegalRequest, code: ascOperationInProgress}

// beginCopy takes a place for a copy. It refuses a list identifier that another copy of the same
// nexus to the same unit has; it ends with BUSY if there are too many copies. endCopy must follow.
func (t *Task) beginCopy(list *copyList) (*copyOperation, error) {
	d := t.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.copying >= maxCopies {
		return nil, statusError(StatusBusy)
	}
	op := &copyOperation{unit: t.unit, id: list.id, task: t}
	if !list.identified {
		d.copying++
		return op, nil
	}
	n := t.Nexus
	if old := n.copyLocked(t.unit, list.id); old != nil {
		if old.task != nil && !old.task.aborted.Load() {
			return nil, errOperationInProgress
		}
		n.dropCopyLocked(old)
	}
	n.copies = append(n.copies, op)
	d.copying++
	return op, nil
}

// endCopy gives the place back and keeps what RECEIVE COPY RESULTS tells.
func (t *Task) endCopy(op *copyOperation, failure *senseError) {
	d, n := t.dev, t.Nexus
	d.mu.Lock()
	defer d.mu.Unlock()
	d.copying--
	op.task = nil
	if t.aborted.Load() || t.unit.removed() {
		n.dropCopyLocked(op)
		return
	}
	if failure != nil {
		op.failed = true
		op.status, op.sense = StatusCheckCondition,
			failure.appendTo(nil, t.unit.mode.descriptorSense())
	}
	ended := 0
	for i := len(n.copies) - 1; i >= 0; i-- {
		if n.copies[i].task != nil {
			continue
		}
		if ended++; ended > maxCopiesTold {
			n.copies = slices.Delete(n.copies, i, i+1)
		}
	}
}

// copyLocked finds a copy by its list identifier; nil if the unit knows none.
func (n *Nexus) copyLocked(u *unit, id byte) *copyOperation {
	for _, op := range n.copies {
		if op.unit == u && op.id == id {
			return op
		}
	}
	return nil
}

func (n *Nexus) dropCopyLocked(op *copyOperation) {
	n.copies = slices.DeleteFunc(n.copies, func(o *copyOperation) bool { return o == op })
}

// forgetCopiesLocked forgets the copies of a unit that have ended, as a reset does. Those under way
// are aborted.
func (d *Device) forgetCopiesLocked(u *unit) {
	for n := range d.nexuses {
		n.copies = slices.DeleteFunc(n.copies, func(op *copyOperation) bool {
			return op.unit == u &&
				op.task == nil
		})
	}
}
