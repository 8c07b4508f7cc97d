package metrics

import "sync/atomic"

// statuses are the values of the label "status": what a command can end with (SAM-5 5.3.1), and
// what it is if it ends without an answer. A status that has no place here counts as the last.
var statuses = [...]struct {
	label string
	code  uint8
	fine  bool // the command did what it was to do
}{
	{"good", 0x00, true},
	{"check_condition", 0x02, false},
	{"condition_met", 0x04, true},
	{"busy", 0x08, false},
	{"reservation_conflict", 0x18, false},
	{"task_set_full", 0x28, false},
	{"aborted", 0x40, false},
	{other, 0xff, false},
}

func statusIndex(code uint8) int {
	for i := range statuses {
		if statuses[i].code == code {
			return i
		}
	}
	return len(statuses) - 1
}

// latencies count commands by how long they took.
type latencies [len(bounds) + 1]atomic.Uint64

// outcomes are latencies by status. Those of GOOD are in place, as nearly every command has it; the
// others are made at first sight.
type outcomes struct {
	good latencies
	rest [len(statuses) - 1]atomic.Pointer[latencies]
}

func (o *outcomes) of(code uint8) *latencies {
	if code == statuses[0].code {
		return &o.good
	}
	p := &o.rest[statusIndex(code)-1]
	if l := p.Load(); l != nil {
		return l
	}
	p.CompareAndSwap(nil, new(latencies)) // who comes second uses the first one's
	return p.Load()
}

// each calls f for every status that a command has had, and for GOOD.
func (o *outcomes) each(f func(status int, l *latencies)) {
	f(0, &o.good)
	for i := range o.rest {
		if l := o.rest[i].Load(); l != nil {
			f(i+1, l)
		}
	}
}
