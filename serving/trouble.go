package serving

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

const (
	// calm is how long commands must have succeeded until a trouble is over. On full storage a
	// guest can still write where it has written before.
	calm = 3 * time.Second
	// maxTroubleError is how many bytes of an error are kept.
	maxTroubleError = 300
	// refusedFor is how long a refusal of a fenced peer counts as trouble.
	refusedFor = time.Minute
)

// TroubleOf returns the kind of trouble of a disk's error, and what it means. The kind is "" for a
// disk that has failed, which is reported in another way.
func TroubleOf(err error) (kind, msg string) {
	var medium *disk.MediumError
	failed := errors.Is(err, disk.ErrFailed) // takes precedence over its cause
	switch {
	case errors.Is(err, disk.ErrNotNow):
		return status.TroubleNotNow,
			"content that lies far away does not come: initiators are asked to try again"
	case disk.IsNoSpace(err): // also an error of a store
		return status.TroubleNoSpace, "disk is full: writes fail until space is freed"
	case errors.Is(err, disk.ErrReadOnly), !failed && errors.Is(err,
		syscall.EROFS): // although the disk may be written
		return status.TroubleReadOnly,
			"storage has become read-only: writes fail until it is repaired"
	case failed:
		return "", "disk has failed: restart after repairing its storage"
	case errors.As(err, &medium):
		if kind = status.TroubleReadError; medium.Op == "write" {
			kind = status.TroubleWriteError
		}
		return kind, "storage could not " + medium.Op + " a range of the disk"
	}
	return status.TroubleOther, "command failed for an unexpected reason"
}

// Done tells the observer that a request has ended with err, and notes for people whether the disk
// works. If the front end has set e.Status, the fault is the peer's, and says nothing about the
// disk.
func (s *Disks) Done(d *Disk, e RequestEvent, err error) {
	switch {
	case err == nil:
		d.Worked(e.Op, e.Op.String())
	case e.Status != StatusGood:
	case errors.Is(err, ErrAborted), errors.Is(err, ErrRemoved):
		e.Status = StatusAborted
	case errors.As(err, new(*Refusal)):
		e.Status = StatusConflict
	default:
		e.Status = StatusFailed
		if kind, msg := TroubleOf(err); kind != "" {
			d.Failed(kind, e.Op, e.Op.String(), msg, err, time.Now())
		}
	}
	e.Number = d.Number
	s.Observer.RequestDone(e)
}

// troubles are why requests to a disk fail now. The zero value has none. Any number of goroutines
// may use it.
type troubles struct {
	any atomic.Bool
	mu  sync.Mutex
	all map[string]*trouble // guarded by mu
}

type trouble struct {
	status.Trouble
	op     Operation
	name   string    // of the request that failed last
	worked time.Time // when a request last succeeded that shows that the trouble may be over
}

func (t *trouble) over(now time.Time) bool {
	if t.Kind == status.TroubleFenced {
		return now.Sub(t.Last) >= refusedFor
	}
	return t.worked.After(t.Last) && now.Sub(t.Last) >= calm
}

// Failed notes that a request of this operation and name has failed. kind is one of package status,
// and msg says what it means.
func (t *troubles) Failed(kind string, op Operation, name, msg string, err error, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.all[kind]
	if one == nil || one.over(now) {
		one = &trouble{Trouble: status.Trouble{Kind: kind, Since: now}}
		if t.all == nil {
			t.all = map[string]*trouble{}
		}
		t.all[kind] = one
	}
	if now.Sub(one.Last) >= time.Second { // making the text costs more than all the rest
		text := err.Error()
		one.Error = strings.ToValidUTF8(text[:min(len(text), maxTroubleError)], "")
	}
	one.Message, one.Last, one.op, one.name = msg, now, op, name
	one.Count++
	t.any.Store(true)
}

// refused notes that a fenced client was refused while no owner uses the disk: nobody can use it.
func (d *Disk) refused(c *Client, now time.Time) {
	if owner := d.owner.Load(); owner != nil && owner.sessions.Load() > 0 {
		return
	}
	name := PlainName(c.peer.name)
	d.Failed(status.TroubleFenced, OpOther, name, name+" was fenced by a handover and is refused, "+
		"and nobody else uses the disk", errFenced, now)
}

var errFenced = errors.New("a handover has fenced it")

// Worked notes that a request has succeeded.
func (t *troubles) Worked(op Operation, name string) {
	if !t.any.Load() {
		return
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for kind, one := range t.all {
		if one.shownBy(op, name) {
			one.worked = now
		}
		if one.over(now) {
			delete(t.all, kind)
		}
	}
	t.any.Store(len(t.all) > 0)
}

// shownBy reports whether the success of a request shows that the reason of a failure is over.
func (t *trouble) shownBy(op Operation, name string) bool {
	switch op {
	case OpRead: // also for a failed query of what is allocated: the client may never query again
		return t.op == OpRead || t.op == OpOther &&
			(t.Kind == status.TroubleNotNow || t.Kind == status.TroubleReadError)
	case OpWrite:
		return t.op == OpWrite || t.op == OpDiscard || t.op == OpFlush
	}
	return t.op == op && t.name == name
}

// Troubles returns why requests wait or fail now. A trouble is over when such requests succeed
// again.
func (d *Disk) Troubles(now time.Time) (all []status.Trouble) {
	if w := d.longWait(now); w != nil {
		all = append(all, *w)
	}
	t := &d.troubles
	if !t.any.Load() {
		return all
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, kind := range slices.Sorted(maps.Keys(t.all)) {
		if one := t.all[kind]; !one.over(now) {
			all = append(all, one.Trouble)
		}
	}
	return all
}
