package served

import (
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

// gaugeWait is how long a page waits for the storage of a disk.
const gaugeWait = 200 * time.Millisecond

// gauge reports the space or the content of a disk. Storage may hang, such as a file server that is
// gone, but must not delay the pages on which people look for the reason. So the gauge makes only
// one request at a time, and returns the last answer until the next one arrives. A nil gauge knows
// nothing.
type gauge[T any] struct {
	question func() (T, error)

	mu     sync.Mutex
	last   *T   // guarded by mu; nil: unknown
	asking bool // guarded by mu
}

// newSpaceGauge reports how much space a disk uses and has. It returns nil for a disk that does not
// know.
func newSpaceGauge(d disk.Disk) *gauge[disk.Usage] {
	if a, ok := d.(disk.Accountant); ok {
		return &gauge[disk.Usage]{question: a.Usage}
	}
	return nil
}

// newMapGauge reports where the content of a disk is. It returns nil for a disk that does not know.
func newMapGauge(d disk.Disk) *gauge[disk.Map] {
	m, ok := d.(disk.Mapper)
	if !ok {
		return nil
	}
	return &gauge[disk.Map]{question: func() (disk.Map, error) { return *m.Map(), nil }}
}

// now makes a request, and returns the answer; nil if nothing is known.
func (g *gauge[T]) now() *T { return readAll(time.After(gaugeWait), []*gauge[T]{g})[0] }

// readAll is now for many gauges, side by side. A gauge without an answer at limit returns its last
// one.
func readAll[T any](limit <-chan time.Time, gauges []*gauge[T]) []*T {
	answered := make([]chan struct{}, len(gauges))
	for i, g := range gauges {
		if g != nil {
			answered[i] = g.ask()
		}
	}
	for i := 0; i < len(answered); i++ {
		if answered[i] == nil {
			continue
		}
		select {
		case <-answered[i]:
		case <-limit:
			i = len(answered)
		}
	}
	all := make([]*T, len(gauges))
	for i, g := range gauges {
		if g != nil {
			g.mu.Lock()
			all[i] = g.last
			g.mu.Unlock()
		}
	}
	return all
}

// ask begins a request to storage, or returns nil if the last answer is still outstanding.
func (g *gauge[T]) ask() (answered chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asking {
		return nil
	}
	g.asking, answered = true, make(chan struct{})
	go func() {
		defer close(answered)
		answer, err := g.question()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.asking, g.last = false, nil
		if err == nil {
			g.last = &answer
		}
	}()
	return answered
}

// usageTypeStatus sums up the space of the disks of each type.
func (d *Disks) usageTypeStatus(luns []status.LUN, spaces []*disk.Usage) (all []status.UsageType) {
	for i, name := range d.opt.UsageTypes.Names() {
		one := status.UsageType{Name: name, Directory: d.opt.UsageTypes[name], LUNs: []uint16{}}
		used := int64(0)
		for _, lun := range luns {
			if lun.UsageType != name {
				continue
			}
			one.LUNs = append(one.LUNs, lun.LUN)
			if lun.Space != nil {
				used += lun.Space.Used
			}
		}
		if space := spaces[i]; space != nil {
			one.Space = &status.Space{Used: used, Free: space.Available}
		}
		all = append(all, one)
	}
	return all
}
