package scsi

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Trouble is why commands to a LUN fail now.
type Trouble struct {
	Kind        string // one of faultNames
	Message     string // what it means
	Error       string // the last one
	Since, Last time.Time
	Count       int64 // commands that failed since then
}

// faultNames are the kinds of trouble. A fault without a name is none: a disk that has failed is
// told in another way, and so is a command that runs in the background.
var faultNames = [faultCount]string{faultNoSpace: "no_space", faultReadOnly: "read_only",
	faultRead: "read_error", faultWrite: "write_error", faultReservations: "reservations",
	faultNotNow: "not_now", faultOther: "other"}

const (
	// calm is how long commands must have worked until a trouble is over. On full storage a guest
	// can still write where it has written before.
	calm = 3 * time.Second
	// maxTroubleError is how many bytes of an error are kept.
	maxTroubleError = 300
)

// troubles are those of a unit. The zero value has none. Any number of goroutines may use it.
type troubles struct {
	any atomic.Bool
	mu  sync.Mutex
	all map[fault]*trouble // guarded by mu
}

type trouble struct {
	Trouble
	cmd    *command
	worked time.Time // the last command that shows that it may be over
}

func (t *trouble) over(now time.Time) bool {
	return t.worked.After(t.Last) && now.Sub(t.Last) >= calm
}

// failed counts a command that has failed.
func (t *troubles) failed(f fault, cmd *command, msg string, err error, now time.Time) {
	if cmd == nil || faultNames[f] == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.all[f]
	if one == nil || one.over(now) {
		one = &trouble{Trouble: Trouble{Kind: faultNames[f], Since: now}}
		if t.all == nil {
			t.all = map[fault]*trouble{}
		}
		t.all[f] = one
	}
	if now.Sub(one.Last) >= time.Second { // the text costs more than all else
		text := err.Error()
		one.Error = strings.ToValidUTF8(text[:min(len(text), maxTroubleError)], "")
	}
	one.Message, one.Last, one.cmd = msg, now, cmd
	one.Count++
	t.any.Store(true)
}

// worked notes a command that has succeeded.
func (t *troubles) worked(cmd *command) {
	if cmd == nil || !t.any.Load() {
		return
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for f, one := range t.all {
		if shows(cmd, one.cmd) {
			one.worked = now
		}
		if one.over(now) {
			delete(t.all, f)
		}
	}
	t.any.Store(len(t.all) > 0)
}

// shows reports whether the success of a command says anything about why another one failed.
func shows(worked, failed *command) bool {
	switch worked.op {
	case OpRead:
		return failed.op == OpRead
	case OpWrite:
		return failed.op == OpWrite || failed.op == OpDiscard || failed.op == OpFlush
	}
	return worked == failed
}

// now returns the troubles that are not over.
func (t *troubles) now() (all []Trouble) {
	if !t.any.Load() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for f := range faultCount {
		if one := t.all[f]; one != nil && !one.over(now) {
			all = append(all, one.Trouble)
		}
	}
	return all
}

// Worked notes that a command has succeeded.
func (t *Task) Worked() {
	if t.unit != nil {
		t.unit.troubles.worked(t.cmd)
	}
}

// Troubles returns why commands to a LUN fail now.
func (d *Device) Troubles(lun uint16) []Trouble {
	if u := d.luns.Load().at(lun); u != nil {
		return u.troubles.now()
	}
	return nil
}
