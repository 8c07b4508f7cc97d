package metrics

import "sync/atomic"

// statuses are the values of the label "status": the statuses of SAM-5 5.3.1, and "aborted" for a
// command without a response. Any other status counts as the last one.
var statuses = [...]struct {
	label string
	code  uint8
	fine  bool // the command succeeded
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

// latencies count commands by their duration.
type latencies [len(bounds) + 1]atomic.Uint64

// outcomes are latencies by status. GOOD has its counters from the start because nearly every
// command ends with it. The others are made on first use.
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
	p.CompareAndSwap(nil, new(latencies)) // if another goroutine was first, use its counters
	return p.Load()
}

// each calls f for GOOD and for every other status that has occurred.
func (o *outcomes) each(f func(status int, l *latencies)) {
	f(0, &o.good)
	for i := range o.rest {
		if l := o.rest[i].Load(); l != nil {
			f(i+1, l)
		}
	}
}
