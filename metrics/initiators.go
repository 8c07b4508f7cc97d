package metrics

import (
	"cmp"
	"strings"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/serving"
)

// initiatorTable holds the counters by initiator. An initiator is never removed, so its counters
// never decrease.
type initiatorTable struct {
	names table[string, *initiator] // by the name that the peer gave
	rest  initiator                 // all initiators beyond the bound
	known func(lun uint16) bool
	pairs atomic.Int64 // of an initiator and a LUN, with counters of their own
}

// tidy removes the counters of LUNs that are gone, so that they do not use up the bounds.
func (t *initiatorTable) tidy() {
	gone := func(key lunKey) bool { return key != otherLUN && !t.known(uint16(key)) }
	t.rest.units.drop(gone)
	for _, i := range t.names.all() {
		if i != &t.rest {
			t.pairs.Add(-int64(i.units.drop(gone)))
		}
	}
}

// initiator holds the counters of one initiator name.
type initiator struct {
	label             string
	normal, discovery atomic.Int64 // current sessions
	// units of rest also have the initiators that are one too many for their LUN
	units table[lunKey, *series]
}

// lunKey is a LUN of the target. All other LUN numbers are otherLUN.
type lunKey int32

const otherLUN lunKey = -1

func (t *initiatorTable) init(known func(lun uint16) bool) {
	t.rest.label, t.known = other, known
}

func (t *initiatorTable) get(name string) *initiator {
	if i, ok := t.names.find(name); ok {
		return i
	}
	if name == other || len(t.names.all()) >= maxInitiators {
		return &t.rest
	}
	// The name is a slice of a receive buffer. Clone it, so that the buffer can be freed.
	name = strings.Clone(name)
	return t.names.put(name, func(size int) *initiator {
		if size >= maxInitiators {
			return &t.rest
		}
		return &initiator{label: t.unique(name)}
	})
}

// unique returns the label of a name: the name itself, or "other" if another name has the same
// label after the conversion to valid UTF-8.
func (t *initiatorTable) unique(name string) string {
	l := cmp.Or(label(name), "unknown")
	for _, i := range t.names.all() {
		if i.label == l {
			return other
		}
	}
	return l
}

func (i *initiator) gauge(discovery bool) *atomic.Int64 {
	if discovery {
		return &i.discovery
	}
	return &i.normal
}

// series returns the counters of the initiator at a LUN.
func (i *initiator) series(lun uint16, t *initiatorTable) *series {
	if s, ok := i.units.find(lunKey(lun)); ok {
		return s
	}
	if i != &t.rest && t.pairs.Load() >= maxPairs {
		return t.rest.series(lun, t)
	}
	key := otherLUN
	if t.known(lun) {
		key = lunKey(lun)
	}
	if s, ok := i.units.find(key); ok {
		return s
	}
	if i == &t.rest {
		return i.units.put(key, func(size int) *series {
			return &series{shared: size >= maxShared}
		})
	}
	return i.units.put(key, func(int) *series {
		if key != otherLUN {
			t.pairs.Add(1)
		}
		return new(series)
	})
}

// operations are the values of the label "operation". Any other operation counts as OpOther.
var operations = [...]serving.Operation{serving.OpRead, serving.OpWrite, serving.OpFlush,
	serving.OpDiscard, serving.OpOther}

// bounds are the upper bounds of the latency buckets, from a page cache's answer to a stalled disk.
var bounds = [...]time.Duration{
	10 * time.Microsecond, 25 * time.Microsecond, 50 * time.Microsecond, 100 * time.Microsecond,
	250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second,
	5 * time.Second, 30 * time.Second,
}

// series counts the commands of one initiator to one LUN.
type series struct {
	shared bool // it is shown together with others
	ops    [len(operations)]counters
}

// counters count one operation.
type counters struct {
	took  [len(bounds) + 1]atomic.Uint64 // commands, by their duration
	ended [len(statuses)]atomic.Uint64   // the same commands, by their status
	nanos atomic.Uint64
	bytes atomic.Uint64
}

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

func (s *series) count(e serving.RequestEvent) {
	c := &s.ops[operationIndex(e.Op)]
	c.took[bucket(e.Duration)].Add(1)
	c.ended[statusIndex(e.Status)].Add(1)
	c.nanos.Add(uint64(max(e.Duration, 0)))
	if e.Bytes > 0 {
		c.bytes.Add(uint64(e.Bytes))
	}
}

func operationIndex(op serving.Operation) int {
	for i, o := range operations {
		if o == op {
			return i
		}
	}
	return len(operations) - 1
}

// bucket returns the index of the first bound that is at least d.
func bucket(d time.Duration) int {
	for i, bound := range bounds {
		if d <= bound {
			return i
		}
	}
	return len(bounds)
}
