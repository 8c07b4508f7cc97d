package scsi

import (
	"slices"
	"sync/atomic"
)

// copyOperation is an EXTENDED COPY under way, or the result of one that has ended.
type copyOperation struct {
	unit     *unit // the copy manager
	id       byte
	segments atomic.Uint32 // number of segments that have begun
	bytes    atomic.Uint64 // written so far

	task   *Task // guarded by Device.mu; nil: it has ended
	failed bool  // guarded by Device.mu
}

// maxCopiesTold bounds how many ended copies are remembered for a nexus.
const maxCopiesTold = 32

var errOperationInProgress = &senseError{key: IllegalRequest, code: ascOperationInProgress}

// beginCopy registers a copy and takes a place for it. endCopy must follow. It refuses a list
// identifier that another copy of the same nexus to the same unit has, and fails with BUSY if there
// are too many copies.
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
		if old.task != nil && !old.task.Aborted() {
			return nil, errOperationInProgress
		}
		n.dropCopyLocked(old)
	}
	n.copies = append(n.copies, op)
	d.copying++
	return op, nil
}

// endCopy gives the place back and keeps the result for RECEIVE COPY STATUS.
func (t *Task) endCopy(op *copyOperation, failed bool) {
	d, n := t.dev, t.Nexus
	d.mu.Lock()
	defer d.mu.Unlock()
	d.copying--
	op.task = nil
	if t.Aborted() || t.unit.Removed() {
		n.dropCopyLocked(op)
		return
	}
	op.failed = failed
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

// copyLocked finds a copy by its list identifier; nil if there is none.
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

// forgetCopiesLocked forgets the ended copies of a unit, for a reset. The reset aborts copies under
// way.
func (d *Device) forgetCopiesLocked(u *unit) {
	for n := range d.nexuses {
		n.copies = slices.DeleteFunc(n.copies, func(op *copyOperation) bool {
			return op.unit == u && op.task == nil
		})
	}
}
