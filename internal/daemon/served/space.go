package served

import (
	"slices"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/status"
)

// gaugeWait is how long a page waits for the storage of a disk.
const gaugeWait = 200 * time.Millisecond

// gauge reports what a disk says about itself. Storage may hang, such as a file server that is
// gone, but must not hold up the pages on which people look for the reason. So the gauge asks only
// once, and returns the last answer until the next one arrives. A nil gauge knows nothing.
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

// now asks, and returns the answer; nil if nothing is known.
func (g *gauge[T]) now() *T { return readAll([]*gauge[T]{g})[0] }

// latest returns the last answer without asking; nil if nothing is known.
func (g *gauge[T]) latest() *T {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last
}

// readAll is now for many gauges. Together they take no longer than one.
func readAll[T any](gauges []*gauge[T]) []*T {
	return readUntil(time.After(gaugeWait), gauges)
}

// readUntil asks all gauges at once, and waits for their answers until limit.
func readUntil[T any](limit <-chan time.Time, gauges []*gauge[T]) []*T {
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
		all[i] = g.latest()
	}
	return all
}

// refresh brings the last answers of all disks and usage types up to date, for the metrics.
func (d *Disks) refresh() { d.askStorage(time.After(gaugeWait)) }

// askStorage asks the storage of all disks and usage types at once, so that latest is up to date. A
// gauge without an answer at limit keeps its last one.
func (d *Disks) askStorage(limit <-chan time.Time) {
	gauges := slices.Clone(d.storages)
	for _, s := range d.table.served() {
		gauges = append(gauges, s.look().space)
	}
	readUntil(limit, gauges)
}

// ask asks the storage, or returns nil if the last answer is still outstanding.
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

// measureUsageTypes tells the metrics which storages there are.
func (d *Disks) measureUsageTypes() {
	for _, name := range d.opt.UsageTypes.Names() {
		space := &gauge[disk.Usage]{question: func() (disk.Usage, error) {
			free, err := image.AvailableSpace(d.opt.UsageTypes[name])
			return disk.Usage{Available: free}, err
		}}
		d.storages = append(d.storages, space)
		d.metrics.AddUsageType(metrics.UsageType{Name: name, Space: func() *disk.Usage {
			free := space.latest()
			if free == nil {
				return nil
			}
			sum := disk.Usage{Available: free.Available}
			for _, s := range d.table.served() {
				of := s.look().space.latest()
				if of != nil && s.UsageType == name {
					sum.Used += of.Used
				}
			}
			return &sum
		}})
	}
}

// usageTypeStatus sums up the space of the disks of each type.
func (d *Disks) usageTypeStatus(luns []status.LUN) (all []status.UsageType) {
	spaces := readAll(d.storages)
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
